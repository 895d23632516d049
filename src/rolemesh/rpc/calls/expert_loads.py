"""Loads of a mixture's experts between processes: as messages, and checked where they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from rolemesh.v1 import experience_pb2

Loads: TypeAlias = Mapping[int, Sequence[int]]
"""How often each expert was chosen, by the number of its layer in the model, ascending."""

MAX_NUMBERS = 1 << 17
"""Numbers of one answer: 128 layers of 1,024 experts. A number takes 9 bytes at most, so that the
answer fits into a message of 4 MiB. Qwen3-30B-A3B has 6,144 numbers."""

MAX_CHOICES = (1 << 53) - 1
"""Of one expert: whole numbers up to it are exact in JSON, whoever reads it."""


def loads_message(loads: Loads) -> list[experience_pb2.LayerLoads]:
    """As they travel."""
    return [
        experience_pb2.LayerLoads(layer=layer, choices=choices) for layer, choices in loads.items()
    ]


def checked_loads(told: Iterable[experience_pb2.LayerLoads]) -> dict[int, list[int]]:
    """Loads as another process told them; empty where it told none.

    Raises:
        ValueError: They are not what trainer.proto says; names the field and the remedy.
    """
    layers = list(told)
    num_experts = len(layers[0].choices) if layers else 0
    if len(layers) * num_experts > MAX_NUMBERS:
        raise ValueError(
            f"expert_loads has {len(layers)} layers of {num_experts} experts: tell at most "
            f"{MAX_NUMBERS} numbers, or none"
        )
    loads: dict[int, list[int]] = {}
    before = -1
    for place, one in enumerate(layers):
        where = f"expert_loads[{place}]"
        if one.layer <= before:
            raise ValueError(
                f"{where}.layer is {one.layer}, behind {before}: number layers from 0, ascending"
            )
        if not one.choices or len(one.choices) != num_experts:
            raise ValueError(
                f"{where}.choices has {len(one.choices)} numbers, and the first layer has "
                f"{num_experts}: give each layer one for each expert"
            )
        low, high = min(one.choices), max(one.choices)
        if low < 0 or high > MAX_CHOICES:
            wrong = low if low < 0 else high
            raise ValueError(f"{where}.choices holds {wrong}: give 0 to {MAX_CHOICES}")
        before = one.layer
        loads[one.layer] = list(one.choices)
    return loads


def summed_loads(parts: Sequence[Loads]) -> dict[int, list[int]]:
    """The sum over several calls of one role; empty where none told any.

    Raises:
        ValueError: They are of different layers, or of different numbers of experts.
    """
    told = [part for part in parts if part]
    if len({tuple((layer, len(choices)) for layer, choices in part.items()) for part in told}) > 1:
        raise ValueError("expert_loads of two calls are of different layers or experts")
    return {
        layer: [sum(numbers) for numbers in zip(*(part[layer] for part in told), strict=True)]
        for layer in (told[0] if told else ())
    }
