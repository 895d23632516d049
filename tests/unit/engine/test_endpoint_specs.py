"""Where an endpoint may be asked for, and at which addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.specs import AdapterSpec, EndpointSpec, HfSpec, VllmSpec
from rolemesh.engine.specs.roles import ActorSpec, RolloutRoleSpec

MODEL = {"path": "/models/one"}
DATA = {"type": "reasoning_gym", "task": "chain_sum", "train_size": 4, "held_out_size": 2}


def actor(**given: Any) -> ActorSpec:
    usual = {"model": MODEL, "data": DATA, "endpoint": {}, "rollout": {"type": "vllm"}}
    return ActorSpec.model_validate({**usual, **given})


def rollout(**given: Any) -> RolloutRoleSpec:
    usual = {"model": MODEL, "data": DATA, "endpoint": {}, "rollout": {"type": "vllm"}}
    return RolloutRoleSpec.model_validate({**usual, **given})


def test_an_endpoint_is_for_whoever_samples_with_vllm_on_one_rank() -> None:
    assert actor().endpoint == rollout().endpoint == EndpointSpec()
    assert actor(endpoint=None).endpoint is None


@pytest.mark.parametrize("make", [actor, rollout])
def test_another_sampler_serves_no_endpoint(make: Any) -> None:
    with pytest.raises(ValidationError, match=r"endpoint is given, but rollout\.type is 'hf'"):
        make(rollout={"type": "hf"})


def test_an_actor_that_does_not_sample_serves_no_endpoint() -> None:
    with pytest.raises(ValidationError, match=r"endpoint is given, but rollout\.type is left out"):
        actor(rollout=None)


@pytest.mark.parametrize(
    ("make", "field", "given"),
    [(actor, "train", {"dp": 2}), (rollout, "layout", {"dp": 2}), (rollout, "layout", {"tp": 2})],
)
def test_several_ranks_serve_one(make: Any, field: str, given: Any) -> None:
    assert make(**{field: given}).rank_layout().world_size == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "policy.example"])
def test_an_address_that_others_reach_needs_a_certificate_and_a_key(host: str) -> None:
    with pytest.raises(ValidationError, match="without certificate and token_variable"):
        EndpointSpec(host=host)
    with pytest.raises(ValidationError, match="without token_variable"):
        EndpointSpec(host=host, certificate=Path("a.pem"))
    with pytest.raises(ValidationError, match="without certificate:"):
        EndpointSpec(host=host, token_variable="POLICY_KEY")
    EndpointSpec(host=host, certificate=Path("a.pem"), token_variable="POLICY_KEY")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_neither(host: str) -> None:
    EndpointSpec(host=host)


@pytest.mark.parametrize(
    "given",
    [{"port": 65536}, {"max_sessions": 0}, {"token_variable": "PATH"}, {"tool_parsers": "x"}],
)
def test_fields_that_make_no_sense_are_refused(given: Any) -> None:
    with pytest.raises(ValidationError):
        EndpointSpec.model_validate(given)


def test_other_samplers_are_not_made_with_an_endpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"endpoint is given, but rollout\.type is 'hf'"):
        make_backend(HfSpec(), tmp_path, has_endpoint=True)


def test_an_engine_that_several_runs_share_serves_no_endpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="several runs share this service's engine"):
        make_backend(
            VllmSpec(), tmp_path, adapter=AdapterSpec(), shares_engine=True, has_endpoint=True
        )
