"""Parts of an algorithm's section: how a step asks for them, and how a recipe may write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeVar, cast, get_args

from pydantic import BaseModel, Field

from rolemesh.engine.specs import (
    DistillationLossSpec,
    EstimatorSpec,
    GaeSpec,
    GrpoSpec,
    LossSpec,
    OwnFunctionSpec,
    PpoPolicyLossSpec,
    PythonEstimatorSpec,
    PythonPolicyLossSpec,
    ReinforcePlusPlusSpec,
    ReinforcePolicyLossSpec,
    RlooSpec,
    SamplingSpec,
    SelectionSpec,
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
GrpoOrOwnSpec = Annotated[GrpoSpec | PythonEstimatorSpec, Field(discriminator="type")]
RlooOrOwnSpec = Annotated[RlooSpec | PythonEstimatorSpec, Field(discriminator="type")]
ReinforcePlusPlusOrOwnSpec = Annotated[
    ReinforcePlusPlusSpec | PythonEstimatorSpec, Field(discriminator="type")
]
PpoOrOwnLossSpec = Annotated[PpoPolicyLossSpec | PythonPolicyLossSpec, Field(discriminator="type")]
ReinforceOrPpoLossSpec = Annotated[
    ReinforcePolicyLossSpec | PpoPolicyLossSpec | PythonPolicyLossSpec, Field(discriminator="type")
]
"""The plain policy gradient of the paper, the clipped loss in its place, or one of your own."""
DistillingLossSpec = Annotated[
    PpoPolicyLossSpec | ReinforcePolicyLossSpec | DistillationLossSpec | PythonPolicyLossSpec,
    Field(discriminator="type"),
]
"""The clipped loss or the plain policy gradient of the teacher's say of single tokens, the
divergence from its distribution, or a loss of your own."""


def long_forms(section: type[BaseModel], data: Any) -> Any:
    """A section whose parts are all mappings with a type.

    A text is the name of a part, or "python:FILE.py:NAME", a function of the user. A mapping
    without a type is the only part of ours that the field takes.
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
            members = [one for one in get_args(field.annotation) if isinstance(one, type)]
            ours = [one for one in members if not issubclass(one, OwnFunctionSpec)]
            if len(ours) == 1 and issubclass(ours[0], BaseModel):
                data[name] = {"type": ours[0].model_fields["type"].default, **given}
    return data
