"""Small facts that ranks tell each other (counts, metrics, errors), and decisions on them.

Facts travel as JSON, so that nothing that a peer sends is ever executed. Not for tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

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
        group: Who takes part.
        device: Where the group's messages lie.

    Returns:
        The facts of all ranks, in the group's order.
    """
    if group.process_group is None:
        return [facts]
    if dist.get_backend(group.process_group) == "fake":
        # One rank stands for all where memory is estimated (engine/fit): the others say the same.
        return [facts] * group.size
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


def have_same_number(number: int, group: RankGroup, device: torch.device) -> bool:
    """Whether all ranks of a group give one number, which they call with: one small reduction.

    Args:
        number: This rank's, int64.
        group: Who takes part.
        device: Where the group's messages lie.
    """
    if group.process_group is None:
        return True
    ends = torch.tensor([number, -number], dtype=torch.int64, device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MIN, group=group.process_group)
    smallest, negated_largest = ends.tolist()
    return bool(smallest == -negated_largest)


def try_together(
    work: Callable[[], tuple[WorkT, Any]], gather: Gather
) -> tuple[list[WorkT], Exception | None, list[dict[str, Any]]]:
    """Does work on every rank and tells all ranks how it went. All ranks call it.

    A rank that gave up by itself would leave the others waiting for it. What an error of one rank
    becomes on the others is the caller's decision.

    Args:
        work: Uses no collective; gives what this rank needs, and facts for all ranks (JSON-able).
        gather: Hands each rank's facts to every rank.

    Returns:
        What this rank's work gave (nothing after an error), its error, and the answers of all
        ranks: "facts", or "classes" (names of the error's class and its bases) and "error" (text).
    """
    try:
        result, facts = work()
    except Exception as error:
        classes = [kind.__name__ for kind in type(error).__mro__]
        return [], error, gather({"classes": classes, "error": str(error)})
    return [result], None, gather({"facts": facts})


def prepare_together(
    prepare: Callable[[], tuple[WorkT, Any]], group: RankGroup, device: torch.device
) -> tuple[WorkT, list[Any]]:
    """Prepares on every rank, and goes on only if all ranks can.

    Args:
        prepare: Uses no collective; gives what this rank needs and the facts that others need.
        group: Who takes part.
        device: Where the group's messages lie.

    Returns:
        What this rank prepared, and the facts of all ranks in the group's order.

    Raises:
        ValueError: Another rank could not prepare. (This rank's own failure is raised as it is.)
    """
    gather = partial(gather_facts, group=group, device=device)
    prepared, failure, answers = try_together(prepare, gather)
    if failure is not None:
        raise failure
    for rank, answer in zip(group.ranks, answers, strict=True):
        if "error" in answer:
            raise ValueError(f"rank {rank} cannot use its rows: {answer['error']}")
    return prepared[0], [answer["facts"] for answer in answers]


@dataclass(frozen=True, slots=True)
class Peers:
    """A rank among those that write or read a folder together, as it sees them.

    Example::

        peers = Peers.of(mesh.world, device)
        size, sizes = peers.agree(lambda: (path.stat().st_size,) * 2)
    """

    rank: int
    """Number of this rank."""
    size: int
    """How many ranks there are."""
    gather: Gather
    """How the ranks tell each other facts."""

    @classmethod
    def of(cls, group: RankGroup, device: torch.device) -> Peers:
        """The ranks of a group, whose messages lie on a device."""
        return cls(group.index, group.size, partial(gather_facts, group=group, device=device))

    @classmethod
    def alone(cls) -> Peers:
        """The only rank."""
        return cls(0, 1, lambda facts: [facts])

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which does what only one may do."""
        return self.rank == 0

    def agree(
        self,
        work: Callable[[], tuple[WorkT, Any]],
        errors: tuple[type[Exception], ...] = (ValueError,),
    ) -> tuple[WorkT, list[Any]]:
        """Does work on every rank; all go on, or all raise the same.

        Args:
            work: Calls no peer; gives what this rank needs, and facts for all ranks (JSON-able).
            errors: Classes that arrive on other ranks as what they are, special ones first.

        Returns:
            What this rank's work gave, and the facts of all ranks.

        Raises:
            Exception: What failed on the lowest rank of those that failed: there as it was; on
                others of the same class and with the same message if it is one of `errors`, else a
                RuntimeError that names rank and cause.
        """
        results, failure, answers = try_together(work, self.gather)
        for rank, answer in enumerate(answers):
            if "error" not in answer:
                continue
            if failure is not None and rank == self.rank:
                raise failure
            for kind in errors:
                if kind.__name__ in answer["classes"]:
                    raise kind(answer["error"]) from failure
            cause = f"{answer['classes'][0]}: {answer['error']}"
            raise RuntimeError(f"rank {rank} failed: {cause}") from failure
        return results[0], [answer["facts"] for answer in answers]
