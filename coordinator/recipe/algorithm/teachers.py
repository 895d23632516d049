"""Teachers, held against the rest of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolemesh.coordinator.recipe.algorithm.algorithms import (
    AlgorithmSection,
    AlgorithmSpec,
    OnPolicyDistillationSpec,
)
from rolemesh.coordinator.recipe.role_names import field_of, teacher_role
from rolemesh.engine.specs import OneTeacherSpec, OwnFunctionSpec, PartSpec, TeacherSpec


def named_in_data(section: Any) -> list[str]:
    """Roles of a section teacher that has not been validated yet."""
    named = section.get("named") if isinstance(section, Mapping) else None
    if isinstance(section, TeacherSpec):
        named = section.named
    if not isinstance(named, Mapping) or not named:
        return ["teacher"]
    return [teacher_role(str(name)) for name in named]


def with_teachers(algorithm: AlgorithmSpec, teacher: TeacherSpec | None) -> AlgorithmSpec:
    """An algorithm's section whose estimator and loss know how many teachers score a row.

    Args:
        algorithm: Of the recipe.
        teacher: The section of the teacher; None: the recipe has none.

    Raises:
        ValueError: Several score one row, which this algorithm does not read.
    """
    number = 1 if teacher is None or teacher.route is None else teacher.route.most_teachers
    if not isinstance(algorithm, AlgorithmSection):
        return algorithm
    if number > 1 and not isinstance(algorithm, OnPolicyDistillationSpec):
        raise ValueError(
            f"teacher.route has a row scored by {number} teachers, which algorithm "
            f"'on_policy_distillation' reads, and {algorithm.type!r} does not: give one teacher "
            "for each value"
        )
    changed: dict[str, Any] = {}
    for name in ("advantages", "policy_loss"):
        part = algorithm.parts.fields.get(name)
        if number > 1 and isinstance(part, OwnFunctionSpec):
            raise ValueError(
                f"teacher.route has a row scored by {number} teachers, and algorithm.{name} is a "
                "function of yours, which is given one: give one teacher for each value"
            )
        known = {"route": None if teacher is None else teacher.route, "teachers": number}
        told = {field: value for field, value in known.items() if hasattr(part, field)}
        if isinstance(part, PartSpec) and told:
            changed[name] = part.model_copy(update=told)
    return algorithm.model_copy(update=changed) if changed else algorithm


def check_teachers(recipe: Any) -> None:
    """Refuses a recipe that asks teachers at servers for what they do not tell.

    Args:
        recipe: A Recipe, whose parts are valid.

    Raises:
        ValueError: Log-probs are wanted at another temperature than 1, or behind other prompts
            without a tokenizer that makes them.
    """
    algorithm = recipe.algorithm
    if not isinstance(algorithm, AlgorithmSection):
        return
    loss = algorithm.parts.fields.get("policy_loss")
    temperature = loss.logprob_temperature if isinstance(loss, PartSpec) else 1.0
    for role, teacher in recipe.teachers.items():
        if teacher.server is None:
            continue
        field = field_of(role)
        told = with_policy_folder(recipe, role, teacher)
        if told.prompt is not None and told.server is not None and not told.server.policy_folder:
            raise ValueError(
                f"{field}.prompt is given, which the policy's tokenizer renders, and "
                f"{field}.server.policy_folder is not: give a folder of the policy's model that "
                "the teacher's service sees"
            )
        if temperature != 1.0:
            raise ValueError(
                f"algorithm.policy_loss.temperature is {temperature}, that of algorithm.sampling "
                f"where it is left out, but {field}.server gives log-probs at temperature 1 alone: "
                f"set algorithm.sampling.temperature to 1, or give {field}.model in place of "
                f"{field}.server"
            )


def with_policy_folder(recipe: Any, role: str, teacher: OneTeacherSpec) -> OneTeacherSpec:
    """The section with the folder that its servers' tokens are held against, where it is known.

    That is the actor's, where the run starts both services, which then see the same folders.
    """
    server = teacher.server
    if server is None or server.policy_folder is not None or recipe.actor is None:
        return teacher
    services = (*recipe.services_of("actor"), *recipe.services_of(role))
    if any(recipe.address(service) is not None for service in services):
        return teacher
    server = server.model_copy(update={"policy_folder": recipe.actor.model.path})
    return teacher.model_copy(update={"server": server})
