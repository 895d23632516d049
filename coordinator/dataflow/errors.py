"""The error that ends a run, with one message for people."""

from __future__ import annotations

from rolemesh.rpc.errors import RolemeshError, UnavailableError


class RunError(Exception):
    """A run cannot go on. The text says what happened, where, and what to do."""


class RunAbortedError(RunError):
    """A user asked for an end at once."""


class ServiceLostError(RunError):
    """A service ended or does not answer any more.

    Attributes:
        role: Its role.
        cause: What is known, e.g. "was killed by signal 9".
        during: What was going on, e.g. "step 3, actor.update"; empty when not known.
        others: Causes of services that were lost at the same time, by name.
    """

    def __init__(self, role: str, cause: str, during: str = "") -> None:
        self.role = role
        self.cause = cause
        self.during = during
        self.others: dict[str, str] = {}
        super().__init__(f"{during}: {cause}" if during else cause)


class ServiceLeftError(UnavailableError):
    """A call of a service that takes no part in the run any more: others make it."""

    def __init__(self, service: str) -> None:
        super().__init__(f"{service} has left the run")


class NodeFailedError(RunError):
    """A node of the dataflow failed; everything else of its step was cancelled.

    Attributes:
        node: e.g. "actor.update".
        step: Step of the run.
        role: Role that failed. May differ from the node's: a consumer reports its producer's end.
        rank: Rank that failed, None when not known.
        reason: UPPER_SNAKE constant of the error catalogue.
        cause: What the service said.
        remote_traceback: Frames of the service, where it failed in an unforeseen way. They
            are also a note of the exception, which Python prints below its own traceback.
    """

    def __init__(self, node: str, step: int, role: str, cause: BaseException) -> None:
        known = cause if isinstance(cause, RolemeshError) else None
        self.node = node
        self.step = step
        self.role = (known and known.role) or role
        self.rank = known.rank if known else None
        self.reason = known.reason if known else type(cause).__name__
        self.cause = cause
        where = self.role if self.rank is None else f"{self.role} rank {self.rank}"
        text = known.message if known else str(cause)
        super().__init__(f"step {step}: {node} failed on {where} [{self.reason}]: {text}")
        self.remote_traceback = known.remote_traceback if known else ()
        if self.remote_traceback:
            frames = "".join(f"\n  {frame}" for frame in self.remote_traceback)
            self.add_note(f"Traceback of {where} (innermost frame last):{frames}")
