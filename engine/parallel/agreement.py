"""Small facts that ranks tell each other: counts, metrics, errors.

They travel as JSON, so that nothing that a peer sends is ever executed. Not for tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rolemesh.engine.parallel.mesh import RankGroup

PreparedT = TypeVar("PreparedT")


def gather_facts(facts: Any, group: RankGroup, device: torch.device) -> list[Any]:
    """Hands each rank's facts to every rank. All ranks of the group call it.

    Args:
        facts: JSON-able; numbers arrive bit by bit (NaN and infinities too).
        group: who takes part.
        device: where the group's messages lie.

    Returns:
        The facts of all ranks, in the group's order.
    """
    if group.process_group is None:
        return [facts]
    text = json.dumps([group.index, facts]).encode()
    size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in group.ranks]
    dist.all_gather(sizes, size, group=group.process_group)
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    messages = [torch.empty_like(padded) for _ in group.ranks]
    dist.all_gather(messages, padded, group=group.process_group)
    # Torch numbers a group's members in its own order, so each says which it is.
    found = sorted(json.loads(message.cpu().numpy().tobytes()) for message in messages)
    return [theirs for _, theirs in found]


def prepare_together(
    prepare: Callable[[], tuple[PreparedT, Any]], group: RankGroup, device: torch.device
) -> tuple[PreparedT, list[Any]]:
    """Prepares on every rank, and goes on only if all ranks can.

    A rank that gave up by itself would leave the others waiting in their next collective.

    Args:
        prepare: uses no collective; gives what this rank needs and the facts that others need.
        group: who takes part.
        device: where the group's messages lie.

    Returns:
        What this rank prepared, and the facts of all ranks in the group's order.

    Raises:
        ValueError: another rank could not prepare. (This rank's own failure is raised as it is.)
    """
    try:
        prepared, facts = prepare()
    except Exception as error:
        gather_facts({"error": str(error)}, group, device)
        raise
    answers = gather_facts({"facts": facts}, group, device)
    for rank, answer in zip(group.ranks, answers, strict=True):
        if "error" in answer:
            raise ValueError(f"rank {rank} cannot use its rows: {answer['error']}")
    return prepared, [answer["facts"] for answer in answers]
