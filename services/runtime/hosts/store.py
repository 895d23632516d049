"""torch's store of the ranks of a service on several hosts, behind the mesh's own channel.

torch's TCP store listens to everyone. This one asks the first host's agent, which knows its callers
by their certificates.
"""

from __future__ import annotations

import datetime
import itertools
import time
import uuid
from collections.abc import Sequence

from torch.distributed import Store  # type: ignore[attr-defined]

from rolemesh.rpc.channel import MeshChannel, open_channel
from rolemesh.rpc.loop_thread import LoopThread
from rolemesh.rpc.members.identity import Identity
from rolemesh.v1 import hosts_pb2, hosts_pb2_grpc

WAIT_S = 20.0
"""Longest wait of one call; longer ones are several."""


class HostsStore(Store):
    """Keys of the first host's agent. Any thread may call it, also one of torch's.

    torch calls `set`, `get`, `add`, `check`, `wait`, `delete_key` and `clone` from C++, with bytes.

    Example::

        store = HostsStore("10.0.0.2:29400", identity)
        store.set("a", b"1")
        dist.init_process_group("gloo", store=PrefixStore("mesh/1", store), ...)
    """

    def __init__(self, address: str, identity: Identity | None) -> None:
        """Prepares; the first call connects.

        Args:
            address: "host:port" of the first host's agent.
            identity: Of the service; None speaks in clear.
        """
        super().__init__()
        self._address = address
        self._identity = identity
        self._thread = LoopThread("hosts-store", "store of the ranks")
        self._channel: MeshChannel | None = None
        self._timeout_s = 300.0
        self._caller = uuid.uuid4().hex
        self._sequence = itertools.count(1)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Bounds the waits of `get` and `wait`."""
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> datetime.timedelta:
        """Bound of a wait."""
        return datetime.timedelta(seconds=self._timeout_s)

    def set(self, key: str, value: bytes | str) -> None:
        """Sets a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._thread.run(self._set(hosts_pb2.SetKeyRequest(key=key, value=data)))

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there.

        Raises:
            TimeoutError: It did not come in time.
        """
        return self._waited_for(key, self._timeout_s)

    def add(self, key: str, amount: int) -> int:
        """Adds to a number; returns it."""
        request = hosts_pb2.AddToKeyRequest(
            key=key, amount=amount, caller=self._caller, sequence=next(self._sequence)
        )
        return self._thread.run(self._add(request))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return all(self._thread.run(self._get(key, 0.0)) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Returns once all keys are there.

        Raises:
            TimeoutError: One did not come in time.
        """
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + timeout_s
        for key in keys:
            self._waited_for(key, max(0.0, deadline - time.monotonic()))

    def delete_key(self, key: str) -> bool:
        """Removes a key; returns whether it was there."""
        return self._thread.run(self._delete(hosts_pb2.DeleteKeyRequest(key=key)))

    def clone(self) -> HostsStore:
        """A store of the same keys that other threads may use: this one."""
        return self

    def close(self) -> None:
        """Lets go of the connection; the store is of no more use."""
        self._thread.close(1.0)

    def _waited_for(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = min(WAIT_S, max(0.0, deadline - time.monotonic()))
            value = self._thread.run(self._get(key, wait_s))
            if value is not None:
                return value
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"no rank has set {key!r} at {self._address} within {timeout_s:.0f} s: see the "
                    "logs of the other ranks"
                )

    async def _set(self, request: hosts_pb2.SetKeyRequest) -> None:
        await self._stub().SetKey(request)

    async def _get(self, key: str, wait_s: float) -> bytes | None:
        request = hosts_pb2.GetKeyRequest(key=key, wait_ms=int(1e3 * wait_s))
        answer = await self._stub().GetKey(request)
        return answer.value if answer.HasField("value") else None

    async def _add(self, request: hosts_pb2.AddToKeyRequest) -> int:
        return (await self._stub().AddToKey(request)).value

    async def _delete(self, request: hosts_pb2.DeleteKeyRequest) -> bool:
        return (await self._stub().DeleteKey(request)).was_there

    def _stub(self) -> hosts_pb2_grpc.HostsServiceAsyncStub:
        # On the loop of the thread, to which the channel belongs.
        if self._channel is None:
            self._channel = open_channel(self._address, identity=self._identity)
        return hosts_pb2_grpc.HostsServiceStub(self._channel)
