"""Back ends that sample at fakes of vLLM servers with an adapter, and checks of what they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_vllm import FakeVllm
from support.toy_sampling import toy_logprob

from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory
from rolemesh.engine.rollout.servers.sampler import VllmServerBackend
from rolemesh.engine.specs import AdapterSpec, SamplingSpec, VllmServerSpec

ADAPTER = AdapterSpec(rank=4, alpha=8.0)
SAMPLING = SamplingSpec(max_new_tokens=12)
PROBE = (5, 9, 30, 7, 100, 41)

Make = Callable[..., VllmServerBackend]


@contextmanager
def making(folder: Path, servers: list[FakeVllm], shared: Path) -> Iterator[Make]:
    """Makes back ends with the fields of a spec over small bounds; they are closed in the end."""
    made: list[VllmServerBackend] = []

    def make(*, updates_between_steps: bool = False, mesh: Any = None, **fields: Any) -> Any:
        spec = VllmServerSpec.model_validate(
            {
                "urls": [one.url for one in servers],
                "shared_folder": shared,
                "max_model_len": 64,
                "dtype": "float32",
                "timeout_s": 5,
                "deadline_s": 10,
                "breaker_pause_s": 0.2,
                **fields,
            }
        )
        backend = make_backend(
            spec, folder, mesh, adapter=ADAPTER, updates_between_steps=updates_between_steps
        )
        assert isinstance(backend, VllmServerBackend)
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()


def when_rows_have_tokens(
    backend: VllmServerBackend, number: int, act: Callable[[], None]
) -> Callable[[], None]:
    """A hook that acts once, in the middle of so many rows at least.

    Not after a time: a busy machine may have ended, or begun, fewer rows by then.
    """
    has_acted = False

    def look() -> None:
        nonlocal has_acted
        drawing = [row for row in backend._running.values() if row.begun.tokens]
        if not has_acted and len(drawing) >= number:
            has_acted = True
            act()

    return look


def factors(backend: VllmServerBackend, scale: float) -> list[tuple[str, torch.Tensor]]:
    """Factors whose B is a constant."""
    return [
        (name, torch.full(shape, scale if "lora_B" in name else 0.5))
        for name, shape in backend._expected.shapes.items()
    ]


def toy_scale(backend: VllmServerBackend, scale: float) -> float:
    """What the toy makes of them."""
    return scale * sum("lora_B" in name for name in backend._expected.shapes)


def requests(count: int, **fields: Any) -> list[RolloutRequest]:
    return [
        RolloutRequest(row=row, prompt_tokens=[5, 9, 30 + row], seed=1000 + row, **fields)
        for row in range(count)
    ]


def sampled(
    backend: VllmServerBackend, asked: Sequence[RolloutRequest], sampling: SamplingSpec = SAMPLING
) -> dict[int, RolloutTrajectory]:
    found = list(backend.generate(asked, sampling))
    assert sorted(one.row for one in found) == [one.row for one in asked]
    return {one.row: one for one in found}


def check_logprobs(
    asked: Sequence[RolloutRequest],
    found: dict[int, RolloutTrajectory],
    scale_of: Callable[[int], float],
) -> None:
    """Each token's log-prob is that of its own version."""
    for request in asked:
        one = found[request.row]
        row = [*request.prompt_tokens, *one.completion_tokens]
        for index, logprob in enumerate(one.logprobs):
            place = len(request.prompt_tokens) + index
            expected = toy_logprob(row[place - 1], row[place], scale_of(one.policy_versions[index]))
            assert logprob == pytest.approx(expected, abs=1e-6)
