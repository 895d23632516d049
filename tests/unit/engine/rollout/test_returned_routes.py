"""Routes that vLLM gives out itself, and when they are asked for. No vLLM runs here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.vllm.requests.image_prompts import ImagePrompts
from rolemesh.engine.rollout.vllm.requests.returned_routes import ReturnedRoutes
from rolemesh.engine.rollout.vllm.requests.running import RunningRequests
from rolemesh.engine.specs import SamplingSpec
from rolemesh.engine.specs.columns import NO_ROUTE

LAYERS, CHOSEN = 4, 2
WITH_EXPERTS = (1, 3)


def _rows(tokens: int, start: int = 0) -> np.ndarray:
    """A number of its own for each token, layer and place."""
    numbers = np.arange(start, start + tokens)[:, None, None] * 16
    places = np.arange(LAYERS)[:, None] * CHOSEN + np.arange(CHOSEN)
    return (numbers + places).astype(np.uint8)


def _output(rows: np.ndarray | None) -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(routed_experts=rows)])


class Engine:
    """What `ReturnedRoutes` and `RunningRequests` ask of vLLM's engine."""

    def __init__(self, chunks: list[np.ndarray]) -> None:
        state = SimpleNamespace(routed_experts_chunks=chunks)
        self.output_processor = SimpleNamespace(request_states={"7-inside": state})

    def add_request(self, *_: Any, **__: Any) -> str:
        return "7-inside"

    def abort_request(self, ids: list[str], *, internal: bool) -> None:
        assert internal
        for one in ids:
            del self.output_processor.request_states[one]


def test_layers_with_experts_are_taken_and_the_last_token_has_none() -> None:
    routes = ReturnedRoutes(Engine([]), WITH_EXPERTS, CHOSEN)
    found = routes.taken(_output(_rows(3)), "7-inside", 4)
    assert found.tolist() == [
        [2, 3, 6, 7],
        [18, 19, 22, 23],
        [34, 35, 38, 39],
        [NO_ROUTE] * 4,
    ]


def test_a_request_that_is_ended_from_here_is_asked_before() -> None:
    engine = Engine([_rows(2), _rows(1, 2)])
    running = RunningRequests(
        engine,
        SamplingSpec(),
        max_model_len=8,
        stop_tokens=(2,),
        prompts=ImagePrompts(Path("without-images"), torch.device("cpu")),
        routes=ReturnedRoutes(engine, WITH_EXPERTS, CHOSEN),
    )
    request = RolloutRequest(
        row=0, prompt_tokens=[5, 6], seed=1, is_complete=lambda tokens: tokens[-1] == 9
    )
    running.add("7", request, policy_version=0, lora_request=None)
    logprobs = SimpleNamespace(token_ids=[8, 9], logprobs=[-1.0, -2.0])
    told = SimpleNamespace(
        token_ids=[8, 9], logprobs=logprobs, finish_reason=None, routed_experts=None
    )
    output = SimpleNamespace(request_id="7", outputs=[told], finished=False)
    (trajectory,) = running.taken([output])
    assert trajectory.routes is not None
    assert trajectory.routes[:3].tolist() == _rows(3)[:, list(WITH_EXPERTS)].reshape(3, 4).tolist()
    assert not engine.output_processor.request_states
    assert not running


@pytest.mark.parametrize("rows", [None, _rows(2), _rows(4), _rows(3)[:, :3], _rows(3)[..., :1]])
def test_routes_of_other_tokens_layers_or_experts_are_refused(rows: np.ndarray | None) -> None:
    routes = ReturnedRoutes(Engine([]), WITH_EXPERTS, CHOSEN)
    with pytest.raises(RuntimeError, match=r"but 4 tokens need \(3, 4, 2\)"):
        routes.taken(_output(rows), "7-inside", 4)
