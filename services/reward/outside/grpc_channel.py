"""A gRPC connection to a place that is not trusted, and what its errors mean for a reward."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import grpc

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
from rolemesh.services.reward.outside.http import bearer_token


def open_endpoint(url: str, spec: EndpointRewardSpec) -> MeshChannel:
    """A channel to grpc://host:port or, with TLS and the system's certificates, grpcs://host:port.

    Raises:
        ValueError: the URL has no port.
    """
    parts = urlsplit(url)
    if parts.port is None:
        raise ValueError(f"urls has {url!r}: give the port too, e.g. {parts.scheme}://host:50051")
    address = f"{parts.netloc}"
    options: list[tuple[str, Any]] = [
        *CLIENT_OPTIONS,
        ("grpc.max_receive_message_length", spec.max_response_bytes),
        # Tries are counted and spaced by `EndpointReward` alone.
        ("grpc.enable_retries", 0),
    ]
    if parts.scheme == "grpcs":
        channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(), options=options)
    else:
        channel = grpc.aio.insecure_channel(address, options=options)
    return MeshChannel(channel, address, ChannelTraffic())


def call_metadata(spec: EndpointRewardSpec) -> tuple[tuple[str, str], ...]:
    """The token, where the spec names one; ValueError when its variable is not set."""
    token = bearer_token(spec)
    return () if token is None else (("authorization", f"Bearer {token}"),)


def reward_error(endpoint: str, error: RolemeshError) -> OutsideRewardError:
    """What the end of a call means: whether the same request may succeed later."""
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
