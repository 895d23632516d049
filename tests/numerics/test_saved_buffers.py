"""A buffer that is in the model's files goes where parameters go: GLM4-MoE's bias of experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cut_ranks import slots_of
from support.parallel_training import near_policy
from support.rollout_checks import load_trainer_model, perturb
from support.tiny_families import write_tiny_decoder
from support.token_batches import token_batch
from support.updates import update_whole

from rolemesh.engine.layout.manifest import DtypeName
from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.rollout.hf.sampler import HfBackend
from rolemesh.engine.specs import HfSpec, ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train.export import export_policy
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.weights.exchanges.exchange import exchange_plan

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_decoder(
        tmp_path_factory.mktemp("glm"),
        "glm4_moe",
        moe_intermediate_size=24,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        eos_token_id=2,
    )


@pytest.fixture
def trainer(folder: Path) -> Trainer:
    return Trainer.policy(ModelSpec(path=folder), OptimizerSpec(learning_rate=1e-3))


def _bias(trainer: Trainer) -> torch.Tensor:
    return dict(trainer.named_weights())[BIAS]


def _move(trainer: Trainer) -> torch.Tensor:
    """Changes it, as balancing does, to numbers that bfloat16 has not."""
    _bias(trainer).add_(torch.linspace(0.1, 0.7, 6))
    moved = _bias(trainer).clone()
    assert not torch.equal(moved, moved.bfloat16().float())
    return moved


def test_buffers_of_files_are_weights_and_tables_are_not(trainer: Trainer) -> None:
    names = [name for name, _ in trainer.named_weights()]
    assert names[-1] == BIAS
    assert sorted(names) == sorted(trainer.model.lm.state_dict())
    held = {name for name, _ in trainer.model.lm.named_buffers()}
    assert held - set(names) == {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}
    assert dict(trainer.weights_layout.manifest).keys() == set(names)


@pytest.mark.parametrize("kind", ["checkpoint", "cut"])
def test_checkpoints_and_cuts_restore_them(trainer: Trainer, tmp_path: Path, kind: str) -> None:
    batch = token_batch(vocab_size=100)
    logprobs = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    scored = near_policy(batch, logprobs)
    update_whole(trainer, scored, PpoPolicyLossSpec(), epochs=1, mini_batch_rows=8, seed=5)
    # Moments of all weights but the buffer.
    assert trainer.optimizer_state("exp_avg").keys() == {
        name for name, _ in trainer.model.named_weights()
    }
    saved, slots = _move(trainer), slots_of(trainer, tmp_path)
    if kind == "checkpoint":
        trainer.save(tmp_path / "checkpoint")
    else:
        trainer.save_cut(slots, 1, {}, lambda *_: None)
    _move(trainer)
    if kind == "checkpoint":
        trainer.load(tmp_path / "checkpoint")
    else:
        trainer.restore_cut(slots, 1)
    torch.testing.assert_close(_bias(trainer), saved, rtol=0, atol=0)
    slots.close()


def test_exports_hold_them_unrounded(trainer: Trainer, folder: Path, tmp_path: Path) -> None:
    moved = _move(trainer)
    trainer.export(tmp_path / "live")
    trainer.save(tmp_path / "checkpoint")
    export_policy(tmp_path / "checkpoint", folder, tmp_path / "later")
    for name in ("live", "later"):
        stored = load_file(tmp_path / name / "model.safetensors")
        torch.testing.assert_close(stored.pop(BIAS), moved, rtol=0, atol=0)
        assert {one.dtype for one in stored.values()} == {torch.bfloat16}
        loaded = load_trainer_model(tmp_path / name).state_dict()
        for weight, value in trainer.named_weights():
            expected = value if weight == BIAS else value.bfloat16().float()
            torch.testing.assert_close(loaded[weight], expected, rtol=0, atol=0)


@pytest.mark.parametrize("lends", [False, True], ids=["copied", "lent"])
def test_the_sampler_hf_takes_them_unrounded(trainer: Trainer, folder: Path, lends: bool) -> None:
    sampler = HfBackend(HfSpec(max_model_len=32, dtype="bfloat16"), folder)
    moved = _move(trainer)
    take = sampler.update_shard if lends else sampler.update_weights
    take(trainer.named_weights(), 1)
    assert torch.equal(sampler._parameters[BIAS], moved)
    perturb(trainer.model.lm, seed=1)
    _move(trainer)
    before = sampler.weight_checksums()
    take(trainer.named_weights(), 2)
    after = sampler.weight_checksums()
    assert torch.equal(sampler._parameters[BIAS], _bias(trainer))
    assert {name for name in after if lends or before[name] != after[name]} == set(after)
    sampler.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exchange_brings_them_as_they_are(trainer: Trainer, dtype: DtypeName) -> None:
    alone = TrainLayout()
    plan = exchange_plan(trainer.weights_layout.manifest, None, alone, alone, dtype)
    assert plan.wire_dtype(BIAS) == "float32"
    assert plan.wire_dtype("model.norm.weight") == dtype
