"""Translation of the store's errors into errors of the catalogue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rolemesh.coordinator.state.errors import RunNotFoundError, StoreUnavailableError
from rolemesh.coordinator.state.store import EntryExpiredError
from rolemesh.rpc.errors import NotFoundError, OutOfRangeError, UnavailableError


@contextmanager
def translated() -> Iterator[None]:
    """Translates what the block raises."""
    try:
        yield
    except RunNotFoundError as missing:
        raise NotFoundError(
            str(missing), reason="RUN_NOT_FOUND", metadata={"run_id": missing.run_id}
        ) from missing
    except EntryExpiredError as expired:
        raise OutOfRangeError(
            str(expired), reason="EVENTS_EXPIRED", metadata={"run_id": expired.run_id}
        ) from expired
    except StoreUnavailableError as unavailable:
        raise UnavailableError(
            str(unavailable), reason="STORE_UNAVAILABLE", metadata={"url": unavailable.url}
        ) from unavailable
