"""Format of a cut: what a slot says of itself, and where everything lies in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from rolemesh.engine.layout.manifest import DtypeName
from rolemesh.engine.layout.payload import aligned
from rolemesh.engine.train.optimizers.host_moments import MOMENTS, STATE_NAMES
from rolemesh.engine.train.state import AVERAGE, TrainedWeights
from rolemesh.engine.transport.slots.slot_files import PAGE_BYTES
from rolemesh.engine.weights.exchanges.published import Place
from rolemesh.engine.weights.sharded_tensors import TORCH_DTYPES

WEIGHTS = "weights"
GROUPS = (WEIGHTS, *STATE_NAMES, AVERAGE)
"""Groups of tensors of a cut, in the order of its slot."""

EXTRA_BYTES = 1 << 20
"""Room in the header for what is no tensor: random state, and the caller's state."""

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class CutMismatchError(ValueError):
    """The cut is of another model, layout or kind; names what differs."""


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TensorEntry(_Closed):
    """A tensor of a cut."""

    shape: tuple[int, ...]
    dtype: DtypeName
    offset: int
    """First byte, counted from the beginning of the slot's tensors."""


class CutHeader(_Closed):
    """What a slot says of itself."""

    format: Literal["rolemesh-cut-1"]
    run_id: str
    kind: str
    """ "policy", "critic" or "reward"."""
    step: int
    policy_version: int
    layout: str
    """Of training: `TrainLayout.flag()`."""
    rank: int
    optimizer_steps: int
    num_bytes: int
    """Of all tensors."""
    tensors: dict[str, dict[str, TensorEntry]]
    """By group and name. What the optimizer does not keep yet is absent."""
    extra: dict[str, Any]
    """State of the caller."""
    random_tensors: dict[str, Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$")]]
    """Hexadecimal bytes of random states."""
    random: dict[str, Any]
    base: dict[str, str] | None = None
    """What an adapter stands on, as `BaseIdentity.facts` says; of rank 0."""


@dataclass(frozen=True, slots=True)
class CutPlan:
    """Where everything lies in a rank's slots; a function of model and layout alone."""

    places: Mapping[str, Mapping[str, Place]]
    """Where each tensor that a cut may have lies in the slot, by group and name."""
    entries: Mapping[str, Mapping[str, TensorEntry]]
    text_bytes: int
    """Longest text of the header."""
    num_bytes: int
    """Of a slot."""

    @staticmethod
    def of(weights: TrainedWeights) -> CutPlan:
        """The plan for a rank's weights and what an optimizer keeps for them."""
        entries: dict[str, dict[str, TensorEntry]] = {}
        at = 0
        for group in GROUPS:
            entries[group] = {}
            for name, weight in (weights.average if group == AVERAGE else weights.tensors).items():
                if group in STATE_NAMES and not weights.keeps(name, group):
                    continue
                shape = tuple(weight.shape) if group not in STATE_NAMES or group in MOMENTS else ()
                # Optimizer and average are kept in float32.
                dtype = weight.dtype if group == WEIGHTS else torch.float32
                entry = TensorEntry(shape=shape, dtype=_DTYPE_NAMES[dtype], offset=at)
                entries[group][name] = entry
                at += aligned(torch.Size(shape).numel() * dtype.itemsize)
        text_bytes = len(encoded({"tensors": _plain(entries)})) + EXTRA_BYTES
        begin = PAGE_BYTES + -(-text_bytes // PAGE_BYTES) * PAGE_BYTES
        places = {
            group: {
                name: Place(begin + one.offset, one.shape, TORCH_DTYPES[one.dtype])
                for name, one in found.items()
            }
            for group, found in entries.items()
        }
        return CutPlan(places, entries, text_bytes, begin + at)


def check_header(header: CutHeader, plan: CutPlan, kind: str, layout: str, step: int) -> None:
    """Raises CutMismatchError unless the cut is of this kind, layout and model."""
    for what, theirs, own in (("kind", header.kind, kind), ("layout", header.layout, layout)):
        if theirs != own:
            raise CutMismatchError(
                f"the cut of step {step} is of {what} {theirs!r}, and this service's is {own!r}: "
                "start the service as it was when it saved the cut"
            )
    if bool(header.tensors.get(AVERAGE)) != bool(plan.entries[AVERAGE]):
        has, keeps = ("no average", "one") if plan.entries[AVERAGE] else ("an average", "none")
        raise CutMismatchError(
            f"the cut of step {step} has {has} of the weights, and this service keeps {keeps}: "
            "give it the teacher.average that it had when it saved the cut"
        )
    for group in GROUPS:
        found, expected = header.tensors.get(group, {}), plan.entries[group]
        # What an optimizer does not keep yet is absent.
        names = dict.fromkeys([*found, *(() if group in STATE_NAMES else expected)])
        for name in names:
            if (theirs := _kind_of(found.get(name))) != (own := _kind_of(expected.get(name))):
                raise CutMismatchError(
                    f"the cut of step {step} is of another model: {name!r} of {group!r} is "
                    f"{theirs}, but the model's is {own}: give the model and the type of optimizer "
                    "that the run began with"
                )
        if any(found[name].offset != expected[name].offset for name in found):
            raise CutMismatchError(
                f"the cut of step {step} has {group!r} in another order: give the model that the "
                "run began with"
            )
    stepped = header.tensors.get(STATE_NAMES[0], {}).keys()
    if header.tensors.keys() - set(GROUPS) or any(
        header.tensors.get(name, {}).keys() != stepped & plan.entries[name].keys()
        for name in STATE_NAMES
    ):
        raise CutMismatchError(
            f"the cut of step {step} has the groups {sorted(header.tensors)}, which do not fit "
            "each other: restore it with the version that saved it"
        )


def _kind_of(entry: TensorEntry | None) -> str:
    return "absent" if entry is None else f"{entry.dtype} {list(entry.shape)}"


def parsed(text: bytes | None) -> CutHeader | None:
    """The header; None where there is none, or none that this version can read."""
    if text is None:
        return None
    try:
        return CutHeader.model_validate(json.loads(text))
    except (ValueError, RecursionError):  # also of pydantic
        return None


def encoded(content: Mapping[str, Any]) -> bytes:
    """JSON values as the text of a header."""
    return json.dumps(content, separators=(",", ":")).encode()


def _plain(entries: Mapping[str, Mapping[str, TensorEntry]]) -> dict[str, Any]:
    return {
        group: {name: one.model_dump() for name, one in found.items()}
        for group, found in entries.items()
    }
