"""Agreement of ranks that write or read a folder together that all of them can go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rolemesh.engine.parallel.agreement import Gather, attempt_together

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
        tried = attempt_together(work, self.gather)
        for rank, refusal in tried.refusals.items():
            if rank == self.rank and tried.failure is not None:
                raise tried.failure
            known = next((kind for kind in errors if kind.__name__ in refusal.classes), None)
            if known is not None:
                raise known(refusal.message) from tried.failure
            cause = f"{refusal.classes[0]}: {refusal.message}"
            raise RuntimeError(f"rank {rank} failed: {cause}") from tried.failure
        return cast(WorkT, tried.result), tried.facts
