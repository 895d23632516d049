"""Teachers at servers, held against the rest of a recipe."""

from __future__ import annotations

from typing import Any

from rolemesh.coordinator.recipe.algorithms import AlgorithmSection
from rolemesh.engine.specs import PartSpec, TeacherSpec


def check_teacher(recipe: Any) -> None:
    """Refuses a recipe that asks a teacher at servers for what they do not tell.

    Args:
        recipe: A Recipe, whose parts are valid.

    Raises:
        ValueError: Log-probs are wanted at another temperature than 1, or behind other prompts
            without a tokenizer that makes them.
    """
    teacher, algorithm = recipe.teacher, recipe.algorithm
    if teacher is None or teacher.server is None or not isinstance(algorithm, AlgorithmSection):
        return
    told = with_policy_folder(recipe, teacher)
    if told.prompt is not None and told.server is not None and told.server.policy_folder is None:
        raise ValueError(
            "teacher.prompt is given, which the policy's tokenizer renders, and "
            "teacher.server.policy_folder is not: give a folder of the policy's model that the "
            "teacher's service sees"
        )
    loss = algorithm.parts.fields.get("policy_loss")
    temperature = loss.logprob_temperature if isinstance(loss, PartSpec) else 1.0
    if temperature != 1.0:
        raise ValueError(
            f"algorithm.policy_loss.temperature is {temperature}, that of algorithm.sampling where "
            "it is left out, but teacher.server gives log-probs at temperature 1 alone: set "
            "algorithm.sampling.temperature to 1, or give teacher.model in place of teacher.server"
        )


def with_policy_folder(recipe: Any, teacher: TeacherSpec) -> TeacherSpec:
    """The section with the folder that its servers' tokens are held against, where it is known.

    That is the actor's, where the run starts both services, which then see the same folders.
    """
    server = teacher.server
    if server is None or server.policy_folder is not None or recipe.actor is None:
        return teacher
    services = (*recipe.services_of("actor"), *recipe.services_of("teacher"))
    if any(recipe.address(service) is not None for service in services):
        return teacher
    server = server.model_copy(update={"policy_folder": recipe.actor.model.path})
    return teacher.model_copy(update={"server": server})
