"""A gRPC connection to a place that is not trusted, and what its errors mean for a reward."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import grpc

from rolemesh.engine.granted.bearer_tokens import bearer_token
from rolemesh.engine.specs import EndpointRewardSpec
from rolemesh.rpc.channel import CLIENT_OPTIONS, ChannelTraffic, MeshChannel
from rolemesh.rpc.errors import (
    CallCancelledError,
    CapacityError,
    DeadlineError,
    RolemeshError,
    UnavailableError,
    UnsupportedError,
)
from rolemesh.services.reward.outside.base import (
    OutsideRewardError,
    RewardRefusedError,
    RewardTimeoutError,
    RewardUnavailableError,
)


class GrpcEndpoint:
    """One address: grpc://host:port or, with TLS and the system's certificates, grpcs://host:port.

    Owner: the loop on which it is first used; a channel belongs to the loop that opened it.
    """

    def __init__(self, url: str, spec: EndpointRewardSpec) -> None:
        """Prepares; opens no connection yet.

        Raises:
            ValueError: The URL has no port, or has a path, or the token is not set.
        """
        parts = urlsplit(url)
        if parts.port is None:
            raise ValueError(
                f"urls has {url!r}: give the port too, e.g. {parts.scheme}://host:50051"
            )
        if parts.path.strip("/") or parts.query or parts.fragment:
            raise ValueError(
                f"urls has {url!r}: gRPC knows no path, so give {parts.scheme}://{parts.netloc}"
            )
        self._address = parts.netloc
        self._is_encrypted = parts.scheme == "grpcs"
        self._max_bytes = spec.max_response_bytes
        self._channel: MeshChannel | None = None
        token = bearer_token(spec.token_variable, "the reward service")
        self.metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        """Metadata of each call: the token, if there is one."""

    @property
    def channel(self) -> MeshChannel:
        """The connection, opened at first use."""
        if self._channel is None:
            options: list[tuple[str, Any]] = [
                *CLIENT_OPTIONS,
                ("grpc.max_receive_message_length", self._max_bytes),
                # Only `EndpointReward` counts and spaces tries.
                ("grpc.enable_retries", 0),
            ]
            channel = (
                grpc.aio.secure_channel(
                    self._address, grpc.ssl_channel_credentials(), options=options
                )
                if self._is_encrypted
                else grpc.aio.insecure_channel(self._address, options=options)
            )
            self._channel = MeshChannel(channel, self._address, ChannelTraffic())
        return self._channel

    async def close(self) -> None:
        """Closes the connection."""
        if self._channel is not None:
            await self._channel.close()


def reward_error(endpoint: str, error: RolemeshError) -> OutsideRewardError:
    """Translates the error of a call: its class says whether a repeat may succeed."""
    found = f"{error.code.name}: {error.message}"
    if isinstance(error, DeadlineError):
        return RewardTimeoutError(endpoint, found=found, remedy="raise timeout_s")
    if isinstance(error, UnavailableError | CallCancelledError) or error.retryable:
        return RewardUnavailableError(endpoint, found=found)
    remedy = "see the log of the reward service"
    if isinstance(error, UnsupportedError):
        remedy = "name an address that serves this protocol"
    elif isinstance(error, CapacityError):
        remedy = "lower batch_size or concurrency, or let the service take more"
    return RewardRefusedError(endpoint, expected="rewards", found=found, remedy=remedy)
