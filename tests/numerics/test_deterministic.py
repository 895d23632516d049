"""Training and sampling under torch's deterministic algorithms, as `run.deterministic` on a GPU.

On a CPU each operation keeps its order in any case: the flag refuses nothing, and changes no bit.
What a GPU makes of it is in tests/gpu/test_deterministic_cuda.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.parallel_training import near_policy
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch, with_shared_prompts
from support.updates import update_whole

from rolemesh.engine.experience import Experience
from rolemesh.engine.rollout.base import generated
from rolemesh.engine.rollout.hf.sampler import HfBackend
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.specs import (
    HfSpec,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    PpoValueLossSpec,
    SamplingSpec,
)
from rolemesh.engine.train.trainer import Trainer


@pytest.fixture
def deterministic() -> Iterator[None]:
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tied", seed=4)


def rows(trainer: Trainer) -> Experience:
    """Two completions of each prompt, drawn by nearly the same policy."""
    lengths = [3 + row // 2 for row in range(8)]
    batch = token_batch(prompt_lengths=lengths, completion_lengths=[5] * 8)
    batch = with_shared_prompts(batch, 2)
    if trainer.kind == "critic":
        return batch
    return near_policy(batch, trainer.compute_logprobs(batch, temperature=1.0)["logprobs"])


def trained(folder: Path, kind: str, recompute: str) -> dict[str, torch.Tensor]:
    """The weights after two optimizer steps over rows that share their prompts."""
    spec = ModelSpec.model_validate({"path": folder, "recompute": recompute})
    make = Trainer.policy if kind == "policy" else Trainer.critic
    loss: LossSpec = (
        PpoPolicyLossSpec(entropy_coefficient=0.01) if kind == "policy" else PpoValueLossSpec()
    )
    torch.manual_seed(0)
    trainer = make(spec, OptimizerSpec(learning_rate=1e-3))
    update_whole(trainer, rows(trainer), loss, epochs=1, mini_batch_rows=4, seed=3)
    return {name: weight.clone() for name, weight in trainer.named_weights()}


@pytest.mark.parametrize(("kind", "recompute"), [("policy", "full"), ("critic", "none")])
def test_an_update_is_refused_nothing_and_has_the_same_bits(
    folder: Path, kind: str, recompute: str, request: pytest.FixtureRequest
) -> None:
    expected = trained(folder, kind, recompute)
    request.getfixturevalue("deterministic")
    found = trained(folder, kind, recompute)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def drawn(folder: Path) -> list[tuple[int, ...]]:
    """What plain transformers samples for some prompts."""
    backend = HfBackend(HfSpec(max_model_len=24), folder)
    weights = dict(Trainer.policy(ModelSpec(path=folder), OptimizerSpec()).named_weights())
    backend.update_weights(weights.items(), 0)
    requests = [
        RolloutRequest(row=row, prompt_tokens=(5, 6, 7 + row % 2), seed=row) for row in range(6)
    ]
    with generated(backend, requests, SamplingSpec(max_new_tokens=8)) as found:
        return [tuple(one.completion_tokens) for one in sorted(found, key=lambda one: one.row)]


def test_the_hf_sampler_is_refused_nothing_and_draws_the_same(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    expected = drawn(folder)
    request.getfixturevalue("deterministic")
    assert drawn(folder) == expected
