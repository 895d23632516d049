"""Registry of algorithms: the function that makes a step, and the roles that it needs."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rolemesh.coordinator.algorithms.dapo import dapo
from rolemesh.coordinator.algorithms.dpo import dpo
from rolemesh.coordinator.algorithms.kto import kto
from rolemesh.coordinator.algorithms.on_policy_distillation import on_policy_distillation
from rolemesh.coordinator.algorithms.online_dpo import online_dpo
from rolemesh.coordinator.algorithms.policy_gradient import policy_gradient
from rolemesh.coordinator.algorithms.ppo import ppo
from rolemesh.coordinator.algorithms.remax import remax
from rolemesh.coordinator.algorithms.reward_model import reward_model
from rolemesh.coordinator.algorithms.safe_rlhf import safe_rlhf
from rolemesh.coordinator.algorithms.sft import sft
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.futures import ColumnMissingError
from rolemesh.coordinator.dataflow.roles import ROLE_HANDLES, PromptBatch, StepContext
from rolemesh.coordinator.recipe.algorithm.algorithms import (
    AlgorithmSection,
    CustomSpec,
    ExternalSpec,
)
from rolemesh.coordinator.recipe.algorithm.policy_gradients import POLICY_GRADIENTS
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.granted.user_code import load_offered
from rolemesh.engine.specs import PartSpec, Spec

Algorithm = Callable[..., None]

ALGORITHMS: Mapping[str, Algorithm] = {
    **dict.fromkeys(POLICY_GRADIENTS, policy_gradient),
    **{
        algorithm.__name__: algorithm
        for algorithm in (
            *(ppo, safe_rlhf, dapo, remax, on_policy_distillation, online_dpo),
            *(dpo, kto, sft, reward_model),
        )
    },
}
"""By `algorithm.type` of the recipe."""

ENTRY_POINTS = "rolemesh.algorithms"
"""Group of entry points under which other packages offer algorithms."""


_MAKERS: Mapping[str, str] = {
    "reference_logprobs": "reference",
    "teacher_logprobs": "teacher",
    "values": "critic",
    "rewards": "reward",
    "costs": "cost",
}
"""The role that makes a column, where only one can."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Roles that an algorithm asks for, in the order of its parameters."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    """Those whose parameter may be None: used where the recipe has them."""

    @property
    def every(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.required, *self.optional)


def roles_of(algorithm: Algorithm) -> Roles:
    """Roles that the algorithm asks for: the names of its parameters after `prompts`.

    Raises:
        ValueError: A parameter is no role.
    """
    first, *parameters = inspect.signature(algorithm).parameters.values() or (None,)
    if first is None or first.name != "prompts":
        found = "missing" if first is None else repr(first.name)
        raise ValueError(f"{algorithm.__name__}: the first parameter is {found}, not 'prompts'")
    for parameter in parameters:
        if parameter.name not in ROLE_HANDLES:
            raise ValueError(
                f"{algorithm.__name__}: {parameter.name!r} is no role; roles are "
                f"{', '.join(ROLE_HANDLES)}"
            )
    optional = tuple(p.name for p in parameters if p.default is None)
    return Roles(tuple(p.name for p in parameters if p.name not in optional), optional)


def algorithm_of(recipe: Recipe) -> Algorithm:
    """The recipe's algorithm: one of ours, or one that the recipe names.

    Raises:
        ValueError: There is no such function.
    """
    spec = recipe.algorithm
    if isinstance(spec, ExternalSpec):
        raise ValueError(f"algorithm.type is {spec.type!r}: a client makes the steps, no function")
    if not isinstance(spec, CustomSpec):
        return ALGORITHMS[spec.type]
    # The user's own file, named in the user's own recipe, or an entry point.
    found = load_offered(spec.function, "algorithm.function", ENTRY_POINTS)
    if not isinstance(found, types.FunctionType):
        raise ValueError(
            f"algorithm.function is {spec.function!r}: there is no such function; give "
            f"'path/to/file.py:name', or the name of an entry point of the group {ENTRY_POINTS}"
        )
    return typing.cast(Algorithm, found)


def roles_in(recipe: Recipe) -> tuple[str, ...]:
    """Roles that the recipe's algorithm is run with, the rollout role among them.

    Others that the recipe has are not used: see `unused_roles`.

    Raises:
        ValueError: The recipe lacks a section that the algorithm needs.
    """
    if isinstance(recipe.algorithm, ExternalSpec):
        return recipe.roles
    wanted = roles_of(algorithm_of(recipe))
    for role in wanted.required:
        for player in _players_of(role, recipe):
            recipe.section(player)
    # Without a service, where the actor does its work.
    asked = dict.fromkeys(one for role in wanted.every for one in _players_of(role, recipe))
    used = [role for role in asked if role in recipe.roles]
    if "actor" in used and recipe.rollout is not None:
        used.append("rollout")
    return tuple(used)


def _players_of(role: str, recipe: Recipe) -> tuple[str, ...]:
    """The role itself; of several teachers each. Of a reference that the recipe lacks, the teacher.

    The KL is then taken to the teacher, and pulls where it would hold.
    """
    if role == "reference" and recipe.reference is None and recipe.teacher is not None:
        role = "teacher"
    return tuple(recipe.teachers) if role == "teacher" and recipe.teachers else (role,)


def unused_roles(recipe: Recipe) -> tuple[str, ...]:
    """Roles that have a section which the recipe's algorithm does not ask for."""
    if isinstance(recipe.algorithm, ExternalSpec):
        return ()
    wanted = roles_of(algorithm_of(recipe))
    used = {*roles_in(recipe), *(one for role in wanted.every for one in _players_of(role, recipe))}
    with_section = (*recipe.roles, *sorted(recipe.served_by_actor))
    return tuple(role for role in with_section if role not in used)


def _lacking_role(column: str, wanted: Roles, context: StepContext) -> str:
    """Says which section makes a column that is missing; "" where it is not for lack of one."""
    maker = _MAKERS.get(column)
    if maker is None or context.services_of(maker):
        return ""
    setting = _asking_setting(column, context.algorithm)
    reads = f"{setting or 'a part of the section algorithm'} needs the column {column!r}"
    undo = f"take {setting.split()[0]} out" if setting else "change that part"
    if maker in wanted.optional:
        return (
            f"{reads}, which the role {maker} makes, but the recipe has no section {maker}: add "
            f"one ({maker}: {{model: {{path: FOLDER}}}}), or {undo}"
        )
    return (
        f"{reads}, which the role {maker} makes, but this algorithm does not use that role: "
        f"{undo}, or take another algorithm"
    )


def _asking_setting(column: str, section: AlgorithmSection) -> str:
    """The setting, with its value, but for which nothing would read the column; "" for none."""
    for name, part in section:
        if not isinstance(part, PartSpec) or column not in part.columns():
            continue
        for field, info in type(part).model_fields.items():
            default = info.get_default(call_default_factory=True)
            if column not in part.model_copy(update={field: default}).columns():
                value = getattr(part, field)
                shown = value.model_dump() if isinstance(value, Spec) else value
                return f"algorithm.{name}.{field} is {shown!r}, which"
    return ""


def start_step(algorithm: Algorithm, prompts: PromptBatch, context: StepContext) -> None:
    """Calls the algorithm once: afterwards every node of the step exists.

    Raises:
        RunError: It asks for something that the mesh or the recipe does not have.
    """
    wanted = roles_of(algorithm)
    # One function of ours may be of several types, and functions of users are of one.
    is_own = isinstance(context.algorithm, CustomSpec)
    name = algorithm.__name__ if is_own else context.parts.fields["type"]
    handles = {
        role: ROLE_HANDLES[role](context) for role in wanted.every if context.services_of(role)
    }
    try:
        algorithm(prompts, **handles)
    except ColumnMissingError as error:
        reason = _lacking_role(error.column, wanted, context) or str(error)
        raise RunError(f"algorithm {name!r} cannot be run: {reason}") from error
    except ValueError as error:
        raise RunError(f"algorithm {name!r} cannot be run: {error}") from error
