"""vLLM beside a trainer in one process: computes with each update, and leaves the trainer be.

Experts that vLLM packs for a CPU, and models for which it takes the class of transformers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parallel_training import near_policy
from support.rollout_checks import (
    load_trainer_model,
    logprob_differences,
    rounded_copy,
    set_stop_tokens,
    short_requests,
    trainer_checksums,
)
from support.tiny_families import write_tiny_decoder
from support.token_batches import token_batch
from support.updates import update_whole
from transformers import PreTrainedModel

from rolemesh.engine.parallel.mesh import RankGroup
from rolemesh.engine.rollout.agreement.probe import SamplerCheck, SamplerStaleError, check_sampler
from rolemesh.engine.rollout.agreement.trainer_probe import TrainerProbe
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import (
    ComputeDtype,
    ModelSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    SamplingSpec,
    VllmSpec,
)
from rolemesh.engine.train.trainer import Trainer

LOGPROB_BOUND = 1e-5
"""Mean abs difference. Measured: 5e-7 to 1.1e-6; experts that are packed wrongly give 1."""
LEAST_MOVE = 1e-3
"""The same between two updates: a sampler that kept the weights before would be seen."""
VOCABULARY = 100
REQUESTS = short_requests(VOCABULARY)

EXPERTS: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 32,
    "intermediate_size": 128,
    "num_experts_per_tok": 2,
}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **EXPERTS,
        "moe_intermediate_size": 64,
        "num_experts": 6,
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        **EXPERTS,
        # No multiple of the 32 outputs that vLLM's kernel takes at a time: it pads them.
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "olmo2": {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128},
}
"""Those that vLLM's kernels for a CPU take."""
FAMILIES: list[tuple[str, ComputeDtype]] = [
    ("qwen3_moe", "float32"),
    ("glm4_moe", "bfloat16"),
    ("olmo2", "float32"),
]
"""With the type to which weights are rounded. GLM4-MoE's bias of experts stays as it is."""


@dataclass
class Pair:
    """A trainer, and its sampler."""

    folder: Path
    dtype: ComputeDtype
    trainer: Trainer
    sampler: VllmBackend

    def train(self) -> None:
        """One optimizer step, which moves every weight, and buffers as balancing would."""
        batch = token_batch(vocab_size=VOCABULARY)
        logprobs = self.trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
        update_whole(
            self.trainer,
            near_policy(batch, logprobs),
            PpoPolicyLossSpec(),
            epochs=1,
            mini_batch_rows=8,
            seed=5,
        )
        for _, buffer in self.trainer.model.saved_buffers():
            buffer += 0.1 * torch.randn(buffer.shape)

    def send(self) -> None:
        """Brings the weights to the sampler."""
        self.sampler.update_weights(self.trainer.named_weights(), self.trainer.policy_version)

    def oracle(self) -> PreTrainedModel:
        """A model of transformers' with the trainer's weights."""
        model = load_trainer_model(self.folder)
        state = {name: weight.clone() for name, weight in self.trainer.named_weights()}
        left = model.load_state_dict(state, strict=False).missing_keys
        assert not left
        return model if self.dtype == "float32" else rounded_copy(model)

    def distance(self, model: PreTrainedModel) -> float:
        """Mean abs difference between what is sampled and a model's log-probs of it."""
        sampled = list(self.sampler.generate(REQUESTS, SamplingSpec(max_new_tokens=16)))
        return float(logprob_differences(model, REQUESTS, sampled).mean())


@pytest.fixture(scope="module", params=FAMILIES, ids=[family for family, _ in FAMILIES])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    family, dtype = request.param
    folder = write_tiny_decoder(
        tmp_path_factory.mktemp(family), family, eos_token_id=2, **SIZES[family]
    )
    set_stop_tokens(folder, (2, 3))
    trainer = Trainer.policy(
        ModelSpec(path=folder, compute_dtype=dtype),
        OptimizerSpec(learning_rate=3e-3, max_grad_norm=100.0),
    )
    spec = VllmSpec(dtype=dtype, max_model_len=48, max_num_seqs=8)
    sampler = VllmBackend(spec, folder)
    yield Pair(folder, dtype, trainer, sampler)
    sampler.close()


def test_vllm_computes_with_each_update_of_a_trainer_beside_it(pair: Pair) -> None:
    before: PreTrainedModel | None = None
    for _ in range(3):
        # Forward and backward, in the process in which vLLM has loaded the same class.
        pair.train()
        pair.send()
        now = pair.oracle()
        assert pair.distance(now) < LOGPROB_BOUND
        assert before is None or pair.distance(before) > LEAST_MOVE
        before = now


def test_checksums_are_those_of_the_trainer(pair: Pair) -> None:
    pair.send()
    assert pair.sampler.weight_checksums() == trainer_checksums(pair.oracle(), torch.float32)


def test_after_a_failed_update_the_next_one_is_whole(pair: Pair) -> None:
    """Layers wait in the middle of a load then, those of experts without a kernel."""
    weights = list(pair.trainer.named_weights())
    with pytest.raises(RuntimeError, match="cut off"):
        pair.sampler.update_weights(_cut_off(weights), 7)
    pair.send()
    assert pair.distance(pair.oracle()) < LOGPROB_BOUND


def test_the_check_of_samplers_names_experts_that_are_packed_wrongly(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM by itself packs them: the fault that the check is for."""
    if getattr(pair.trainer.model.config, "moe_intermediate_size", 48) == 48:
        pytest.skip("no experts, or of a width of which vLLM sees that it is packed already")
    row = torch.randint(4, VOCABULARY, (64,), generator=torch.Generator().manual_seed(3)).tolist()
    probe, checked = TrainerProbe(row), SamplerCheck()

    def check() -> None:
        pair.send()
        check_sampler(
            pair.sampler,
            checked,
            probe.scores(pair.trainer.rank_model, version=pair.trainer.policy_version),
            RankGroup((0,), 0, None),
            torch.device("cpu"),
            weights=pair.trainer.named_weights,
        )

    from rolemesh.engine.rollout.vllm.weights import weights as vllm_weights

    check()
    pair.train()
    check()
    with monkeypatch.context() as faulty:
        faulty.setattr(vllm_weights, "experts_packed_anew", lambda model: contextlib.nullcontext())
        with pytest.raises(SamplerStaleError) as refused:
            check()
    told = str(refused.value)
    stacks = [name for name, _ in pair.trainer.named_weights() if ".mlp.experts." in name]
    assert f" {len(stacks)} of " in told
    assert all(repr(name) in told for name in stacks)
    check()


def _cut_off(weights: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from weights[: len(weights) // 2]
    raise RuntimeError("cut off")
