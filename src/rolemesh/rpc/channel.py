"""Channels to mesh services: one checked table of options, default deadlines, counted traffic.

A MeshChannel is a grpc.aio.Channel for the generated stubs. It adds four things to a bare one: a
call without a timeout gets the method's deadline, every call carries a request id, serialized bytes
are counted, and what a call raises is a RolemeshError. It wraps the multi-callables instead of
using aio interceptors: those add a task and two hops to each call, and see no bytes.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

import grpc

from rolemesh.rpc.errors import from_rpc_error
from rolemesh.rpc.limits import MAX_IDLE_CONNECTION_S
from rolemesh.rpc.members.identity import Identity, Trust
from rolemesh.rpc.policy import Idempotency, method_policies
from rolemesh.rpc.tracing import outgoing

REQUEST_ID_KEY = "x-request-id"
"""Metadata key of the id under which a call is found in the logs of both ends."""

CHUNK_BYTES = 1 << 20
"""Payload bytes of one stream message. 1 MiB is where loopback throughput peaks."""

DEADLINE_MARGIN_S = 0.25
"""A call that is made while serving another one ends this much earlier, so that the reason of its
failure can still be sent back."""

RETRY_POLICY: dict[str, Any] = {
    "maxAttempts": 4,
    "initialBackoff": "0.2s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
"""gRPC's own retries (with jitter, inside the deadline), for idempotent methods only."""

# gRPC silently ignores a misspelt option. So all names are here, and a test looks each of them up
# in the library. Message limits stay at gRPC's 4 MiB: a giant message is a loud error.
KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

# A stopped process and a connection that passes nothing are found within 3 s. gRPC answers pings
# from threads of its own: a process whose Python is held by a library for minutes keeps its
# connection (docs/measurements.md). The third one bounds gRPC's own probes of the bandwidth: it
# sends no keepalive while one of them is out, and gives it a minute.
WATCHED_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
)

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    *KEEPALIVE_OPTIONS,
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted peer is found within seconds; gRPC's default waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    # What gRPC gives an attempt to connect, in spite of the name: TCP, TLS and HTTP/2 take three
    # round trips, and a new process on a busy host answers late. What is refused is tried again
    # after the backoff above all the same.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # A mesh address is reached directly, even if http_proxy is set.
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 1),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *KEEPALIVE_OPTIONS,
    # Pings during a long silent call must not end the connection with "too_many_pings".
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # A call waits for a Python that a library holds; the default cancels it after 30 s.
    ("grpc.server_max_unrequested_time_in_server", 300),
    # Otherwise a second process on the port would silently share it.
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 1_024),
    ("grpc.max_connection_idle_ms", int(1_000 * MAX_IDLE_CONNECTION_S)),
)


@dataclass(frozen=True, slots=True)
class CallContext:
    """The call that this task serves; calls it makes inherit id and deadline."""

    request_id: str
    deadline: float
    """End of the call on the clock time.monotonic()."""


_current_call: ContextVar[CallContext | None] = ContextVar("rolemesh_current_call", default=None)


def current_call() -> CallContext | None:
    """The call that the current task serves, None outside of one."""
    return _current_call.get()


@contextmanager
def serving_call(request_id: str, deadline: float) -> Iterator[CallContext]:
    """Marks the current task as serving a call until the block ends."""
    call = CallContext(request_id, deadline)
    token = _current_call.set(call)
    try:
        yield call
    finally:
        # A stream whose client vanished is closed by the loop's generator hook, in another context.
        with suppress(ValueError):
            _current_call.reset(token)


def new_request_id() -> str:
    """A fresh id, 32 hexadecimal digits."""
    return uuid.uuid4().hex


@dataclass(slots=True)
class MethodTraffic:
    """Calls and bytes of one method over a channel."""

    calls: int = 0
    sent_bytes: int = 0
    """Serialized requests."""
    received_bytes: int = 0
    """Serialized responses."""


@dataclass(slots=True)
class ChannelTraffic:
    """Calls and serialized bytes by full method name. Owner: the loop of the channel."""

    methods: dict[str, MethodTraffic] = field(default_factory=dict)

    def of(self, full_method: str) -> MethodTraffic:
        """The counters of a method, made on first use."""
        return self.methods.setdefault(full_method, MethodTraffic())

    @property
    def total(self) -> MethodTraffic:
        """The sum over all methods."""
        return MethodTraffic(
            calls=sum(method.calls for method in self.methods.values()),
            sent_bytes=sum(method.sent_bytes for method in self.methods.values()),
            received_bytes=sum(method.received_bytes for method in self.methods.values()),
        )


def open_channel(
    address: str,
    *,
    traffic: ChannelTraffic | None = None,
    retries: bool = True,
    is_watched: bool = False,
    identity: Identity | Trust | None = None,
) -> MeshChannel:
    """Opens a channel to a service.

    Args:
        address: "host:port".
        traffic: Counters to add to, e.g. one for all channels of a process; None makes fresh ones.
        retries: Whether gRPC repeats idempotent calls; False if the caller repeats them itself.
        is_watched: Whether a peer that is stopped or cut off has to be noticed within seconds. Only
            for servers that are called each second or have SERVER_OPTIONS: others end a connection
            with so many pings and so little data.
        identity: Of this member of the mesh; the peer must then be one, too. A Trust: which peer is
            the right one, of a client that is no member. None: in clear.

    Raises:
        ValueError: The address is not "host:port".
    """
    check_address(address)
    options: dict[str, Any] = dict(CLIENT_OPTIONS)
    if is_watched:
        options |= dict(WATCHED_OPTIONS)
    if retries:
        options["grpc.service_config"] = _service_config()
    credentials = None
    if identity is not None:
        options |= dict(identity.channel_options)
        credentials = identity.channel_credentials()

    def connect(**further: int) -> grpc.aio.Channel:
        chosen = tuple((options | further).items())
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=chosen)
        return grpc.aio.secure_channel(address, credentials, options=chosen)

    counted = traffic or ChannelTraffic()
    # Channels with equal options share a connection unless they are told not to.
    apart = {"grpc.use_local_subchannel_pool": 1}
    return MeshChannel(
        connect(), address, counted, lambda: MeshChannel(connect(**apart), address, counted)
    )


def check_address(address: str) -> None:
    """Raises ValueError for what is not "host:port"."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"address is {address!r}: give host:port without a scheme, e.g. 127.0.0.1:50051"
        )


def _service_config() -> str:
    names = []
    for full_method, policy in method_policies().items():
        if policy.idempotency is Idempotency.IDEMPOTENT:
            _, service, method = full_method.split("/")
            names.append({"service": service, "method": method})
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": RETRY_POLICY}]})


class MeshChannel(grpc.aio.Channel):
    """A grpc.aio channel with the mesh's rules. Owner: the loop that made it.

    Example::

        async with open_channel("127.0.0.1:50051") as channel:
            await WorkerServiceStub(channel).GetStatus(GetStatusRequest())  # deadline 10 s
        channel.traffic.total.calls == 1
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        traffic: ChannelTraffic,
        open_another: Callable[[], MeshChannel] | None = None,
    ) -> None:
        self._channel = channel
        self.address = address
        self.traffic = traffic
        self._open_another = open_another
        self._others: list[MeshChannel] = []

    def connections(self, number: int) -> list[MeshChannel]:
        """This channel and others to the same service, each with a connection of its own.

        They are opened on first use, and kept until this one is closed. A long link is not filled
        by one connection: the sender's kernel keeps 4 MiB of it at most, by default, until the
        far end has them.
        """
        while self._open_another is not None and len(self._others) < number - 1:
            self._others.append(self._open_another())
        return [self, *self._others[: number - 1]]

    async def __aenter__(self) -> MeshChannel:
        """Returns the channel."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Closes the channel."""
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Ends calls in flight after `grace` seconds and closes the connection."""
        others, self._others = self._others, []
        await asyncio.gather(*(one.close(grace) for one in (self._channel, *others)))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """State of the connection."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Returns when the state is another one."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Returns when the connection is established."""
        await self._channel.channel_ready()

    def _method(
        self,
        kind: str,
        full_method: str,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        _registered_method: bool | None = False,
    ) -> _MeshMethod:
        traffic = self.traffic.of(full_method)

        def counted_serialize(message: Any) -> bytes:
            data: bytes = message if request_serializer is None else request_serializer(message)
            traffic.sent_bytes += len(data)
            return data

        def counted_deserialize(data: bytes) -> Any:
            traffic.received_bytes += len(data)
            return data if response_deserializer is None else response_deserializer(data)

        multi_callable = getattr(self._channel, kind)(
            full_method,
            request_serializer=counted_serialize,
            response_deserializer=counted_deserialize,
        )
        return _MeshMethod(multi_callable, full_method, self.address, traffic)

    unary_unary = partialmethod(_method, "unary_unary")
    """One request, one response."""
    unary_stream = partialmethod(_method, "unary_stream")
    """One request, many responses."""
    stream_unary = partialmethod(_method, "stream_unary")
    """Many requests, one response."""
    stream_stream = partialmethod(_method, "stream_stream")
    """Many requests, many responses."""


class _MeshMethod:
    """A multi-callable that fills in deadline and request id."""

    def __init__(
        self, multi_callable: Any, full_method: str, address: str, traffic: MethodTraffic
    ) -> None:
        self._multi_callable = multi_callable
        self._full_method = full_method
        self._address = address
        self._traffic = traffic
        policy = method_policies().get(full_method)
        # Standard services (health, reflection) do not have our policies.
        self._deadline_s = None if policy is None else policy.deadline_s
        self._idle_s = None if policy is None else policy.idle_s

    def __call__(
        self,
        request: Any = None,
        *,
        timeout: float | None = None,
        metadata: Any = None,
        **options: Any,
    ) -> MeshCall:
        """Starts the call; `timeout` in seconds, else the method's deadline and idle time."""
        idle_s = self._idle_s if timeout is None else None
        timeout = self._deadline_s if timeout is None else timeout
        serving = current_call()
        if serving is not None:
            remaining = max(0.0, serving.deadline - time.monotonic() - DEADLINE_MARGIN_S)
            timeout = remaining if timeout is None else min(timeout, remaining)
        request_id = serving.request_id if serving is not None else new_request_id()
        given = tuple(metadata or ())
        if all(key != REQUEST_ID_KEY for key, _ in given):
            given = (*given, (REQUEST_ID_KEY, request_id))
        given = (*given, *outgoing(self._full_method))
        self._traffic.calls += 1
        call = self._multi_callable(request, timeout=timeout, metadata=given, **options)
        return MeshCall(call, self._full_method, self._address, idle_s)


class MeshCall:
    """A call in flight. Await it for one response, or iterate over it for many."""

    def __init__(
        self, call: Any, full_method: str, address: str, idle_s: float | None = None
    ) -> None:
        self._call = call
        self.idle_s = idle_s
        """After how long without progress its reader is to give it up; None: it need not."""
        self._full_method = full_method
        self._address = address

    def __getattr__(self, name: str) -> Any:
        """Passes everything else (cancel, code, trailing_metadata, ...) to gRPC's call."""
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        """The one response; raises RolemeshError."""
        try:
            return (yield from self._call.__await__())
        except grpc.RpcError as error:
            raise self._translated(error) from None

    async def __aiter__(self) -> AsyncIterator[Any]:
        """The responses; raises RolemeshError. Leaving early cancels the call."""
        try:
            async for message in self._call:
                yield message
        except grpc.RpcError as error:
            raise self._translated(error) from None
        finally:
            self._call.cancel()

    def _translated(self, error: grpc.RpcError) -> Exception:
        return from_rpc_error(error, address=self._address, method=self._full_method)
