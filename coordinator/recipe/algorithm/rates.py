"""Lengths of learning-rate schedules: a run's steps as optimizer steps."""

from __future__ import annotations

from rolemesh.coordinator.recipe.algorithm.algorithms import AlgorithmSection, AlgorithmSpec
from rolemesh.engine.specs import DecaySpec, RoleSpec, ScheduledSpec


def planned_updates(algorithm: AlgorithmSpec, num_prompts: int) -> int | None:
    """Optimizer steps of each trained role in one step, where no row is left out.

    Args:
        algorithm: Of the recipe.
        num_prompts: Prompts of a step.

    Returns:
        The number; None where a function of the user or a client decides it.
    """
    if not isinstance(algorithm, AlgorithmSection) or algorithm.rows_per_prompt is None:
        return None
    rows = num_prompts * algorithm.rows_per_prompt
    return algorithm.epochs * -(-rows // algorithm.mini_batch_rows)


def with_length(role: str, section: RoleSpec, updates: int | None, num_steps: int) -> RoleSpec:
    """A role's section in which the learning-rate schedule says how long it is.

    Args:
        role: Whose section it is.
        section: As the recipe gives it.
        updates: Optimizer steps of one step; None: not known.
        num_steps: Steps of the run.

    Raises:
        ValueError: The length is not known, or is over with the warm-up.
    """
    optimizer: ScheduledSpec | None = getattr(section, "optimizer", None)
    schedule = None if optimizer is None else optimizer.schedule
    if optimizer is None or not isinstance(schedule, DecaySpec) or schedule.optimizer_steps:
        return section
    if updates is None:
        raise ValueError(
            f"{role}.optimizer.schedule.type is {schedule.type!r}, but the recipe does not say how "
            "many optimizer steps a step makes, since a function of yours or a client makes them: "
            "give schedule.optimizer_steps"
        )
    total = num_steps * updates
    if total <= optimizer.warmup_steps:
        raise ValueError(
            f"{role}.optimizer.warmup_steps is {optimizer.warmup_steps}, but the run makes {total} "
            f"optimizer steps (run.steps is {num_steps}, with {updates} each), so that nothing is "
            "left of the decay: give fewer warmup_steps, more run.steps, or "
            "schedule.optimizer_steps"
        )
    sent = schedule.model_copy(update={"optimizer_steps": total})
    return section.model_copy(update={"optimizer": optimizer.model_copy(update={"schedule": sent})})


def schedule_length(section: RoleSpec) -> int | None:
    """Optimizer steps until the rate of a section is at its minimum; None where it does not fall.

    Args:
        section: As `with_length` gives it.
    """
    optimizer: ScheduledSpec | None = getattr(section, "optimizer", None)
    schedule = None if optimizer is None else optimizer.schedule
    return schedule.optimizer_steps if isinstance(schedule, DecaySpec) else None
