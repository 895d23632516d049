"""Parts of an algorithm's section: how a step asks for them, and how a recipe may write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, Union, cast, get_args

from pydantic import BaseModel, Field

from rolemesh.engine.specs import (
    DistillationLossSpec,
    EstimatorSpec,
    GaeSpec,
    GroupEstimatorSpec,
    GrpoSpec,
    LossSpec,
    OwnFunctionSpec,
    PartSpec,
    PolicyTermsSpec,
    PpoPolicyLossSpec,
    PythonEstimatorSpec,
    PythonPolicyLossSpec,
    ReinforcePolicyLossSpec,
    SamplingSpec,
    SelectionSpec,
    ShapedRewardSpec,
    python_form,
)

T = TypeVar("T")


class _Part(Generic[T]):
    """A field of a section that holds a T, where the section has that field."""

    def __set_name__(self, owner: type[AlgorithmParts], name: str) -> None:
        self._name = name

    def __get__(self, parts: AlgorithmParts, owner: type[AlgorithmParts]) -> T:
        part = parts.fields.get(self._name)
        if part is None:
            raise ValueError(
                f"algorithm.{self._name} is not given, but the algorithm asks for it: add it"
            )
        return cast(T, part)


class AlgorithmParts:
    """The parts that a step may ask of an algorithm's section, by the names of its fields.

    No section has all of them. To read one that the recipe does not give raises ValueError.
    """

    sampling = _Part[SamplingSpec]()
    advantages = _Part[EstimatorSpec]()
    policy_loss = _Part[LossSpec]()
    value_loss = _Part[LossSpec]()
    reward_loss = _Part[LossSpec]()
    selection = _Part[SelectionSpec]()
    max_rounds = _Part[int]()
    pretraining_weight = _Part[float]()

    def __init__(self, fields: Mapping[str, object]) -> None:
        """Takes the fields of a section by name."""
        self.fields = fields


GaeOrOwnSpec = Annotated[GaeSpec | PythonEstimatorSpec, Field(discriminator="type")]
PpoOrOwnLossSpec = Annotated[PpoPolicyLossSpec | PythonPolicyLossSpec, Field(discriminator="type")]
ReinforceOrPpoLossSpec = Annotated[
    ReinforcePolicyLossSpec | PpoPolicyLossSpec | PythonPolicyLossSpec, Field(discriminator="type")
]
"""The plain policy gradient of the paper, the clipped loss in its place, or one of your own."""


def estimator_choice(first: type[ShapedRewardSpec]) -> Any:
    """Annotation of a field that takes this estimator, one of its kind, or one of your own.

    Estimators that compare the completions of a prompt are of one kind, the others of another.
    """
    compares = issubclass(first, GroupEstimatorSpec)

    def fits(one: type[PartSpec]) -> bool:
        if issubclass(one, OwnFunctionSpec):
            return True
        return issubclass(one, ShapedRewardSpec) and issubclass(one, GroupEstimatorSpec) == compares

    return _choice(first, filter(fits, _members(EstimatorSpec)))


def policy_loss_choice(first: type[PolicyTermsSpec], *more: type[PartSpec]) -> Any:
    """Annotation of a field that takes this policy loss, any other of ours, or one of your own.

    Args:
        first: The one that is meant where a recipe gives no type.
        more: Losses of another kind that it takes besides.
    """
    policy = (one for one in _members(LossSpec) if issubclass(one, PolicyTermsSpec))
    return _choice(first, (*policy, *more))


def _members(union: Any) -> tuple[type[PartSpec], ...]:
    """The specs that `type` chooses from."""
    members, _ = get_args(union)
    return get_args(members)


def _choice(first: type[PartSpec], others: Iterable[type[PartSpec]]) -> Any:
    """A union that `type` chooses from; functions of the user are its last members."""
    members = dict.fromkeys((first, *others))
    ours_first = tuple(sorted(members, key=lambda one: issubclass(one, OwnFunctionSpec)))
    return Annotated[Union[ours_first], Field(discriminator="type")]  # noqa: UP007


if TYPE_CHECKING:
    AnyGroupEstimatorSpec = GroupEstimatorSpec
    AnyPolicyLossSpec = PolicyTermsSpec
    AnyDistillingLossSpec = PolicyTermsSpec | DistillationLossSpec
else:
    # Made of EstimatorSpec and LossSpec, so that what is new there is taken at once.
    AnyGroupEstimatorSpec = estimator_choice(GrpoSpec)
    AnyPolicyLossSpec = policy_loss_choice(PpoPolicyLossSpec)
    AnyDistillingLossSpec = policy_loss_choice(PpoPolicyLossSpec, DistillationLossSpec)


def long_forms(section: type[BaseModel], data: Any) -> Any:
    """A section whose parts are all mappings with a type.

    A text is the name of a part, or "python:FILE.py:NAME", a function of the user. A mapping
    without a type is of the first type that the field takes.
    """
    if not isinstance(data, Mapping):
        return data
    data = dict(data)
    for name in ("advantages", "policy_loss"):
        given, field = data.get(name), section.model_fields.get(name)
        if field is None:
            continue
        if isinstance(given, str):
            data[name] = python_form(given) or {"type": given}
        elif isinstance(given, Mapping) and "type" not in given:
            first = next(iter(get_args(field.annotation)), None)
            if isinstance(first, type) and issubclass(first, BaseModel):
                data[name] = {"type": first.model_fields["type"].default, **given}
    return data
