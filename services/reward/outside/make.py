"""Makes the reward that a spec describes."""

from __future__ import annotations

from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.specs import (
    EndpointRewardSpec,
    GrpcRewardSpec,
    JudgeRewardSpec,
    KServeRewardSpec,
    NemoGymRewardSpec,
    OpenRlhfRewardSpec,
    OutsideRewardSpec,
    PythonRewardSpec,
    SlimeRewardSpec,
)
from rolemesh.services.reward.outside.base import OutsideReward, RewardClient
from rolemesh.services.reward.outside.counts import RequestObserver
from rolemesh.services.reward.outside.endpoints import EndpointReward
from rolemesh.services.reward.outside.functions.reward import FunctionReward
from rolemesh.services.reward.outside.protocols.grpc_reward import GrpcRewardClient
from rolemesh.services.reward.outside.protocols.judge import JudgeClient
from rolemesh.services.reward.outside.protocols.kserve import make_kserve_client
from rolemesh.services.reward.outside.protocols.nemo_gym import NemoGymClient
from rolemesh.services.reward.outside.protocols.openrlhf import OpenRlhfClient
from rolemesh.services.reward.outside.protocols.slime import SlimeClient


def make_outside_reward(
    name: str,
    spec: OutsideRewardSpec,
    sandbox: Sandbox,
    observer: RequestObserver | None = None,
) -> OutsideReward:
    """Makes the reward that the spec describes. It sends no request before it is used.

    Args:
        name: Name for metrics and messages.
        spec: Spec of the reward.
        sandbox: Where a function runs.
        observer: Observer of each request.

    Raises:
        ValueError: There is no reward for this spec, or its token is not set.
    """
    if isinstance(spec, EndpointRewardSpec):
        clients = [make_client(url, spec) for url in spec.urls]
        return EndpointReward(name, spec, clients, observer=observer)
    if isinstance(spec, PythonRewardSpec):
        return FunctionReward(name, spec, sandbox, observer=observer)
    raise ValueError(f"no outside reward is made of {type(spec).__name__}: give another type")


def make_client(url: str, spec: EndpointRewardSpec) -> RewardClient:
    """A client of one replica; see `make_outside_reward`."""
    if isinstance(spec, OpenRlhfRewardSpec):
        return OpenRlhfClient(url, spec)
    if isinstance(spec, SlimeRewardSpec):
        return SlimeClient(url, spec)
    if isinstance(spec, NemoGymRewardSpec):
        return NemoGymClient(url, spec)
    if isinstance(spec, JudgeRewardSpec):
        return JudgeClient(url, spec)
    if isinstance(spec, GrpcRewardSpec):
        return GrpcRewardClient(url, spec)
    if isinstance(spec, KServeRewardSpec):
        return make_kserve_client(url, spec)
    raise ValueError(f"no client is made of {type(spec).__name__}: give another type")
