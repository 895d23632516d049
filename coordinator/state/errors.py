"""Errors of stores."""

from __future__ import annotations

from rolemesh.engine.specs.urls import masked_url


class StateStoreError(Exception):
    """A store refuses a command, or cannot do it."""


class StoreUnavailableError(StateStoreError):
    """The store does not answer."""

    def __init__(self, url: str, cause: BaseException, tried_s: float = 0.0) -> None:
        """Makes the message.

        Args:
            url: URL of the store; its password is not shown.
            cause: What the last attempt ended with.
            tried_s: For how long it was tried again, in seconds; 0: it was tried once.
        """
        self.url = masked_url(url)
        tried = f", tried for {tried_s:.0f} s" if tried_s else ""
        super().__init__(
            f"the store at {self.url} does not answer ({type(cause).__name__}: {cause}{tried}): "
            "start it, correct store.url in the recipe, or use store.type=embedded, which needs no "
            "server"
        )


class StoreRefusedError(StoreUnavailableError):
    """The store answers with a refusal: it has no memory or disk left, or is read-only."""

    def __init__(self, url: str, cause: BaseException) -> None:
        self.url = masked_url(url)
        StateStoreError.__init__(
            self,
            f"the store at {self.url} refuses a command ({type(cause).__name__}: {cause}): see to "
            "its memory, its disk and what this user may do there",
        )


class RunNotFoundError(StateStoreError):
    """No run of that id is in the store."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        super().__init__(
            f"no run {run_id!r} in this store: list_runs of the SDK, or GET /api/v1/runs, says "
            "which there are"
        )


class RunExistsError(StateStoreError):
    """A run of that id is in the store already."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        super().__init__(f"run {run_id!r} exists already in this store: choose another run id")


class StaleEpochError(StateStoreError):
    """A newer coordinator has taken the run over; the older one must stop writing."""

    def __init__(self, run_id: str, epoch: int, current: int) -> None:
        self.run_id = run_id
        self.epoch = epoch
        self.current = current
        super().__init__(
            f"run {run_id!r}: epoch {epoch} is stale, the store is at epoch {current}: "
            "another coordinator has taken over this run; stop this one"
        )


class JournalLostError(StateStoreError):
    """The store has never given the epoch of this coordinator: it lost its data since."""

    def __init__(self, url: str, run_id: str, epoch: int, current: int) -> None:
        self.run_id = run_id
        self.epoch = epoch
        self.current = current
        super().__init__(
            f"the store at {masked_url(url)} has lost the run {run_id!r}: it is at epoch "
            f"{current}, though it gave epoch {epoch} before: switch on appendonly; the run can be "
            "resumed from its folder"
        )
