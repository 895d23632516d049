"""Agreement of ranks that write or read a folder together that all of them can go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

Gather: TypeAlias = Callable[[Any], list[Any]]
"""Hands each rank's JSON-able facts to every rank, in the order of ranks; all ranks call it."""

WorkT = TypeVar("WorkT")


@dataclass(frozen=True, slots=True)
class Peers:
    """A rank among those that do something together, as it sees them.

    Example::

        peers = Peers(mesh.rank, mesh.world.size, partial(gather_facts, group=mesh.world, ...))
        size, sizes = peers.agree(lambda: (path.stat().st_size,) * 2)
    """

    rank: int
    """This one."""
    size: int
    """How many there are."""
    gather: Gather
    """How they tell each other."""

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

        A rank that gave up by itself would leave the others waiting for it.

        Args:
            work: calls no peer; gives what this rank needs, and facts for all ranks (JSON-able).
            errors: classes that arrive on other ranks as what they are, special ones first.

        Returns:
            What this rank's work gave, and the facts of all ranks.

        Raises:
            Exception: what failed on the lowest rank of those that failed: there as it was; on
                others of the same class and with the same message if it is one of `errors`, else a
                RuntimeError that names rank and cause.
        """
        if self.size == 1:
            result, facts = work()
            return result, [facts]
        failure: Exception | None = None
        done: list[WorkT] = []
        try:
            result, facts = work()
            done.append(result)
            message = {"facts": facts}
        except Exception as error:
            failure = error
            known = next((kind.__name__ for kind in errors if isinstance(error, kind)), None)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            message = {"error": text, "class": known}
        answers = self.gather(message)
        for rank, answer in enumerate(answers):
            if "error" not in answer:
                continue
            if failure is not None and rank == self.rank:
                raise failure
            kinds = {kind.__name__: kind for kind in errors}
            if answer["class"] in kinds:
                raise kinds[answer["class"]](answer["error"]) from failure
            raise RuntimeError(f"rank {rank} failed: {answer['error']}") from failure
        return done[0], [answer["facts"] for answer in answers]
