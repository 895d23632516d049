"""Small facts that ranks tell each other: counts, metrics, errors.

They travel as JSON, so that nothing that a peer sends is ever executed. Not for tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist

from rolemesh.engine.parallel.mesh import RankGroup

Gather: TypeAlias = Callable[[Any], list[Any]]
"""Hands each rank's JSON-able facts to every rank, in the order of ranks; all ranks call it."""

WorkT = TypeVar("WorkT")


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


class Refusal(NamedTuple):
    """Why a rank could not do its work."""

    message: str
    classes: list[str]
    """Names of the exception's class and of those that it derives from."""


class Attempt(NamedTuple, Generic[WorkT]):
    """How the same work went on all ranks, as one of them sees it."""

    result: WorkT | None
    """What this rank's work gave; None where it failed."""
    failure: Exception | None
    """What this rank's work raised; None where it did not."""
    facts: list[Any]
    """What each rank's work has to say to the others; None where it failed."""
    refusals: dict[int, Refusal]
    """By place in the order of ranks: those whose work failed."""


def attempt_together(work: Callable[[], tuple[WorkT, Any]], gather: Gather) -> Attempt[WorkT]:
    """Does work on every rank, and tells all of them how it went; none raises what its work did.

    A rank that gave up by itself would leave the others waiting in their next collective.

    Args:
        work: calls no other rank; gives what this rank needs, and facts for all (JSON-able).
        gather: how ranks tell each other.
    """
    result, facts, failure, refusal = None, None, None, None
    try:
        result, facts = work()
    except Exception as error:
        failure = error
        refusal = [str(error), [kind.__name__ for kind in type(error).__mro__]]
    answers = gather([facts, refusal])
    refusals = {at: Refusal(*said) for at, (_, said) in enumerate(answers) if said is not None}
    return Attempt(result, failure, [told for told, _ in answers], refusals)


def prepare_together(
    prepare: Callable[[], tuple[WorkT, Any]], group: RankGroup, device: torch.device
) -> tuple[WorkT, list[Any]]:
    """Prepares on every rank, and goes on only if all ranks can.

    Args:
        prepare: uses no collective; gives what this rank needs and the facts that others need.
        group: who takes part.
        device: where the group's messages lie.

    Returns:
        What this rank prepared, and the facts of all ranks in the group's order.

    Raises:
        ValueError: another rank could not prepare. (This rank's own failure is raised as it is.)
    """
    tried = attempt_together(prepare, partial(gather_facts, group=group, device=device))
    if tried.failure is not None:
        raise tried.failure
    for place, refusal in tried.refusals.items():
        raise ValueError(f"rank {group.ranks[place]} cannot use its rows: {refusal.message}")
    return cast(WorkT, tried.result), tried.facts
