"""Adapters in training: against PEFT, against float64, on one rank and on many, and on disk."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.adapters import ALPHA, RANK, peft_model, plain_name, write_adapter
from support.parallel_training import Job, Trained, joined, near_policy, train
from support.rank_processes import RankPool
from support.sharded_checkpoints import export, load, refused_load, save
from support.slow_cases import mostly_slow
from support.tiny_families import write_tiny_decoder
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import update_whole
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.model_folders.adapter_config import AdapterFolderError
from rolemesh.engine.models.adapters.adapters import AdapterValues
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.packing.packed_rows import PackedRows, pack_rows
from rolemesh.engine.specs import (
    AdapterSpec,
    ModelSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    PpoValueLossSpec,
)
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.weights.checkpoints.checkpoint import open_checkpoint

FLOAT32_TOLERANCE = 3e-6
"""Relative, of the norm of a gradient: float32 products in another order. Both sides are up to
1.3e-6 from float64 with weights as wide as these (test_trainer)."""
SPREAD_TOLERANCE = 5e-6
"""As in test_parallel_training: sums over slices, and over rows that lie on other ranks."""
STEP_TOLERANCE = 3e-5
"""As there: a step of 1e-3 scaled by a ratio of moments."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4, num_layers=3)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of PEFT, with a B that is not zero, or A would have no gradient."""
    return write_adapter(tmp_path_factory.mktemp("adapter"), base)


def _section(adapter: Path | None, **fields: Any) -> dict[str, Any]:
    found = {"rank": RANK, "alpha": ALPHA, **fields}
    return found if adapter is None else {**found, "from": adapter}


def _spec(base: Path, folder: Path | None, adapter: Any = (), **fields: Any) -> ModelSpec:
    section = _section(folder, **dict(adapter))
    return ModelSpec.model_validate(
        {"path": base, "compute_dtype": "float32", "adapter": section, **fields}
    )


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.double() - right.double()).norm() / right.double().norm().clamp_min(1e-12))


def _scored(logits_BTV: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """Log-probs of the completion tokens, floating [N], by the plainest means."""
    batch = token_batch()
    logprobs_BTV = logits_BTV.log_softmax(-1)
    starts = batch["prompt_lengths"].values.tolist()
    return torch.stack(
        [
            logprobs_BTV[row, at - 1, tokens[at]]
            for row, (tokens, start) in enumerate(zip(batch["tokens"].rows(), starts, strict=True))
            for at in range(start, len(tokens))
        ]
    )


# --- numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    ],
    ids=["all", "two-rslora"],
)
def test_outputs_and_gradients_are_those_of_peft_and_of_float64(
    base: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = write_adapter(tmp_path / "adapter", base, **config)
    fields = {} if not config else {"targets": config["target_modules"], "scaling": "rslora"}
    model = CausalLm(_spec(base, folder, adapter=fields))
    rows = pack_rows(token_batch(), model.device)
    weights_N = torch.randn(len(rows.targets_U), generator=torch.Generator().manual_seed(2))
    logprobs_N = model.finish(model.stage_forward(rows, None), rows, temperature=1.0).logprobs_N
    (logprobs_N * weights_N).sum().backward()

    theirs = peft_model(base, **config)
    expected_N = _scored(theirs(input_ids=rows.rectangle().tokens_BT).logits, rows)
    (expected_N * weights_N).sum().backward()
    torch.testing.assert_close(logprobs_N, expected_N, rtol=0, atol=2e-5)
    expected = {
        plain_name(name): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.grad is not None
    }
    found = {name: weight.grad for name, weight in model.trained_weights()}
    assert found.keys() == expected.keys()
    wide = _float64_gradients(base, folder, rows, weights_N, fields)
    for name, gradient in found.items():
        assert gradient is not None
        assert gradient.abs().max() > 0, name
        assert _distance(gradient, expected[name]) < FLOAT32_TOLERANCE, name
        assert _distance(gradient, wide[name]) < FLOAT32_TOLERANCE, name


def _float64_gradients(
    base: Path, folder: Path, rows: PackedRows, weights_N: torch.Tensor, fields: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Of the factors, through merged matrices W + s B A of a plain model in float64."""
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64).eval()
    factors = {
        plain_name(name): values.double().requires_grad_()
        for name, values in load_file(folder / "adapter_model.safetensors").items()
    }
    scale = AdapterSpec.model_validate(_section(None, **fields)).scale
    merged = {name: weight.detach() for name, weight in lm.named_parameters()}
    for name, a_RI in factors.items():
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            b_OR = factors[f"{module}.lora_B.weight"]
            merged[f"{module}.weight"] = merged[f"{module}.weight"] + scale * b_OR @ a_RI
    logits_BTV = functional_call(lm, merged, (rows.rectangle().tokens_BT,)).logits
    (_scored(logits_BTV, rows) * weights_N.double()).sum().backward()
    return {name: factor.grad for name, factor in factors.items() if factor.grad is not None}


def test_a_new_adapter_changes_nothing_and_only_factors_are_trained(base: Path) -> None:
    batch, optimizer = token_batch(), OptimizerSpec(learning_rate=1e-3)
    plain = Trainer.policy(ModelSpec(path=base, compute_dtype="float32"), optimizer)
    trainer = Trainer.policy(_spec(base, None), optimizer)
    expected = plain.compute_logprobs(batch, temperature=1.0)["logprobs"].values
    found = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"].values
    assert torch.equal(found, expected)
    before = {name: weight.clone() for name, weight in trainer.model.named_weights()}
    scored = near_policy(batch, trainer.compute_logprobs(batch, temperature=1.0)["logprobs"])
    update_whole(trainer, scored, PpoPolicyLossSpec(), epochs=2, mini_batch_rows=3, seed=5)
    trained = dict(trainer.named_weights())
    assert trained.keys() == {name for name in before if ".lora_" in name}
    for name, weight in trainer.model.named_weights():
        assert torch.equal(weight, before[name]) == (name not in trained), name
        # Frozen matrices cost no gradient, and no moments.
        assert weight.requires_grad == (name in trained)
        assert weight.grad is None
    assert trainer.optimizer_state("exp_avg").keys() == trained.keys()


def test_a_critic_trains_its_head_beside_the_adapter(base: Path, tmp_path: Path) -> None:
    trainer = Trainer.critic(_spec(base, None), OptimizerSpec(learning_rate=1e-2))
    update_whole(trainer, token_batch(), PpoValueLossSpec(), epochs=2, mini_batch_rows=4, seed=5)
    weights = dict(trainer.named_weights())
    assert weights["score.weight"].abs().max() > 0
    assert all(".lora_" in name or name.startswith("score.") for name in weights)
    trainer.export(tmp_path / "critic")
    lm = AutoModelForTokenClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(lm, tmp_path / "critic").eval()
    batch = token_batch()
    rows = pack_rows(batch, trainer.model.device)
    logits_BT = theirs(input_ids=rows.rectangle().tokens_BT).logits.squeeze(-1)
    starts = batch["prompt_lengths"].values.tolist()
    lengths = batch["tokens"].lengths().tolist()
    expected_N = torch.cat(
        [
            logits_BT[row, start - 1 : length - 1].detach()
            for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
        ]
    )
    found_N = trainer.compute_values(batch).values
    torch.testing.assert_close(found_N, expected_N, rtol=0, atol=2e-5)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_factors_stay_float32_and_the_base_is_rounded(
    base: Path, adapter: Path, compute_dtype: str
) -> None:
    """Log-probs of a sampler that adds float32 factors to a base of the compute type."""
    model = CausalLm(_spec(base, adapter, compute_dtype=compute_dtype))
    rows = pack_rows(token_batch(), model.device)
    with torch.no_grad():
        found_N = model.finish(model.stage_forward(rows, None), rows, temperature=1.0).logprobs_N
        theirs = peft_model(base)
        for name, weight in theirs.named_parameters():
            if compute_dtype == "bfloat16" and "lora_" not in name:
                weight.data = weight.data.bfloat16().float()
        expected_N = _scored(theirs(input_ids=rows.rectangle().tokens_BT).logits, rows)
    torch.testing.assert_close(found_N, expected_N, rtol=0, atol=2e-5)


# --- many ranks ---------------------------------------------------------------------------

LAYOUTS = {
    "tp2": TrainLayout(tp=2),
    "tp4 (2 kv heads)": TrainLayout(tp=4),
    "pp3": TrainLayout(pp=3),
    "fsdp2": TrainLayout(dp=2, fsdp=2),
    "tp2-hsdp2x2": TrainLayout(tp=2, dp=4, fsdp=2),
    "tp2-pp2-fsdp2": TrainLayout(tp=2, pp=2, dp=2, fsdp=2),
    "tp2-cp2-fsdp2": TrainLayout(tp=2, dp=2, cp=2, fsdp=2),
}


@pytest.fixture(scope="module")
def jobs(base: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    batch = token_batch()
    trainer = Trainer.policy(_spec(base, adapter), OptimizerSpec())
    scored = near_policy(batch, trainer.compute_logprobs(batch, temperature=1.0)["logprobs"])
    policy = Job(
        base,
        scored,
        PpoPolicyLossSpec(entropy_coefficient=0.01),
        model={"adapter": _section(adapter)},
    )
    critic = replace(policy, batch=batch, loss=PpoValueLossSpec(), kind="critic")
    # As on a GPU: FSDP gathers a base of another type than the factors.
    narrow = {**policy.model, "compute_dtype": "bfloat16", "frozen_dtype": "bfloat16"}
    return {"policy": policy, "critic": critic, "narrow base": replace(policy, model=narrow)}


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool, jobs: dict[str, Job]) -> dict[str, Trained]:
    return {kind: joined(rank_pool.run(train, 1, job), TrainLayout()) for kind, job in jobs.items()}


@pytest.mark.parametrize(
    ("kind", "name", "fields"),
    mostly_slow(
        # Each way by itself is in one of these, slices that share heads and tokens, too; all at
        # once for the critic, which has a head beside its factors.
        (1, 6, 7, 8, 9),
        [
            *(("policy", name, {}) for name in LAYOUTS),
            ("policy", "tp2", {"sequence_parallel": True, "recompute": "full"}),
            ("critic", "tp2-pp2-fsdp2", {}),
            ("narrow base", "fsdp2", {}),
        ],
    ),
)
def test_three_steps_agree_with_one_rank(
    rank_pool: RankPool,
    jobs: dict[str, Job],
    alone: dict[str, Trained],
    kind: str,
    name: str,
    fields: dict[str, Any],
) -> None:
    job = replace(jobs[kind], layout=LAYOUTS[name], model={**jobs[kind].model, **fields})
    found = joined(rank_pool.run(train, job.layout.world_size, job), job.layout)
    expected = alone[kind]
    assert found.gradients[0].keys() == expected.gradients[0].keys() == expected.weights.keys()
    for key, gradient in expected.gradients[0].items():
        assert gradient.abs().max() > 0, key
        error = (found.gradients[0][key] - gradient).norm()
        # The bias of a head is one number, a sum whose terms cancel.
        assert error < SPREAD_TOLERANCE * gradient.norm() + 5e-7, key
    # On a CPU that multiplies bfloat16, states of later steps, a last bit apart, are rounded far
    # more coarsely (2**-9).
    norm_tolerance, step_tolerance = (
        (1e-3, 10 * STEP_TOLERANCE) if kind == "narrow base" else (1e-5, STEP_TOLERANCE)
    )
    expected_norm = pytest.approx(expected.metrics["grad_norm"], rel=norm_tolerance)
    assert found.metrics["grad_norm"] == expected_norm
    for key, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[key], weight, rtol=0, atol=step_tolerance)


def test_every_layout_begins_with_the_same_bits(
    rank_pool: RankPool, jobs: dict[str, Job], tmp_path: Path
) -> None:
    job = replace(jobs["policy"], model={"adapter": _section(None, seed=3)})
    job = replace(job, optimizer={"learning_rate": 1e-30})
    trained = [
        joined(rank_pool.run(train, layout.world_size, replace(job, layout=layout)), layout)
        for layout in (TrainLayout(), LAYOUTS["tp2-pp2-fsdp2"])
    ]
    for name, weight in trained[0].weights.items():
        if name.endswith("lora_B.weight"):
            # A step from zero is all that it is.
            assert weight.abs().max() < 1e-28
            continue
        assert torch.equal(weight, trained[1].weights[name]), name
        shape = tuple(weight.shape)
        values = AdapterValues(AdapterSpec(rank=RANK, seed=4))
        other = values.read(name, shape, tuple((0, size) for size in shape))
        assert not torch.equal(weight, other)


# --- on disk ------------------------------------------------------------------------------


def test_checkpoints_hold_the_adapter_alone_and_load_in_another_layout(
    rank_pool: RankPool, jobs: dict[str, Job], base: Path, tmp_path: Path
) -> None:
    job = replace(jobs["policy"], layout=LAYOUTS["tp2-pp2-fsdp2"])
    directory = tmp_path / "checkpoint"
    saved = rank_pool.run(save, job.layout.world_size, job, directory)
    expected = joined([rank.part for rank in saved], job.layout)
    for layout in (TrainLayout(), LAYOUTS["fsdp2"]):
        again = rank_pool.run(load, layout.world_size, replace(job, layout=layout), directory)
        found = joined([rank.part for rank in again], layout)
        for name, weight in expected.weights.items():
            assert torch.equal(found.weights[name], weight), name
            assert torch.equal(found.moments["exp_avg"][name], expected.moments["exp_avg"][name])
    reader = open_checkpoint(directory)
    assert all(".lora_" in name for name in reader.parameters("weights"))
    assert reader.state["base"]["path"] == str(base.resolve())


def test_a_base_that_changed_and_another_scale_are_refused_by_name(
    rank_pool: RankPool, jobs: dict[str, Job], base: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "base"
    shutil.copytree(base, moved)
    job = replace(jobs["policy"], folder=moved, layout=TrainLayout(tp=2))
    directory = tmp_path / "checkpoint"
    rank_pool.run(save, 2, job, directory)
    # The same values elsewhere are the same base.
    rank_pool.run(load, 1, replace(job, folder=base, layout=TrainLayout()), directory)
    other = write_tiny_llama(tmp_path / "other", seed=5, num_layers=3)
    elsewhere = replace(job, folder=other)
    for [(_, text, is_same)] in rank_pool.run(refused_load, 2, elsewhere, directory):
        assert f"was trained on the base {str(moved)!r}" in text
        assert f"not on {str(other)!r}" in text
        assert is_same
    shutil.copyfile(other / "model.safetensors", moved / "model.safetensors")
    for [(_, text, is_same)] in rank_pool.run(refused_load, 2, job, directory):
        assert "whose files have changed since" in text
        assert is_same
    shutil.copyfile(base / "model.safetensors", moved / "model.safetensors")
    scaled = {"adapter": {**job.model["adapter"], "alpha": 2 * ALPHA, "from": None}}
    for [(_, text, _)] in rank_pool.run(refused_load, 2, replace(job, model=scaled), directory):
        assert f"scale {ALPHA / RANK}, but model.adapter gives {2 * ALPHA / RANK}" in text


def test_peft_loads_what_many_ranks_export(
    rank_pool: RankPool, jobs: dict[str, Job], base: Path, tmp_path: Path
) -> None:
    job = replace(jobs["policy"], layout=LAYOUTS["tp2-pp2-fsdp2"])
    rank_pool.run(save, 8, job, tmp_path / "checkpoint")
    for name, layout in (("adapter", job.layout), ("one", TrainLayout())):
        part = replace(job, layout=layout)
        out = tmp_path / name
        rank_pool.run(export, layout.world_size, part, tmp_path / "checkpoint", out, None, 5000)
    file = "adapter_model.safetensors"
    assert (tmp_path / "adapter" / file).read_bytes() == (tmp_path / "one" / file).read_bytes()
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(lm, tmp_path / "adapter").eval()
    model = CausalLm(_spec(base, tmp_path / "adapter"))
    rows = pack_rows(token_batch(), model.device)
    with torch.no_grad():
        found_N = model.finish(model.stage_forward(rows, None), rows, temperature=1.0).logprobs_N
        expected_N = _scored(theirs(input_ids=rows.rectangle().tokens_BT).logits, rows)
        before_N = _scored(peft_model(base)(input_ids=rows.rectangle().tokens_BT).logits, rows)
    torch.testing.assert_close(found_N, expected_N, rtol=0, atol=2e-5)
    assert (found_N - before_N).abs().max() > 1e-3


# --- bad input ----------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_the_remedy(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    def refusal(adapter: Path | None, **fields: Any) -> str:
        with pytest.raises(ValueError, match="adapter") as caught:
            CausalLm(_spec(base, adapter, adapter=fields))
        return str(caught.value)

    told = refusal(None, targets=["q_proj", "wqkv"])
    assert "has 'wqkv'" in told
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj" in told
    assert "adapter.rank is 9999" in refusal(None, rank=9999)
    assert "has rank 4, but adapter.rank is 8: give adapter.rank 4" in refusal(adapter, rank=8)
    assert "has scaling standard" in refusal(adapter, scaling="rslora")
    assert "also holds" in refusal(adapter, targets=["q_proj"])
    assert "has no adapter_config.json" in refusal(tmp_path)

    some = write_adapter(tmp_path / "some", base, target_modules=["q_proj"])
    assert "lacks 'model.layers.0.self_attn.k_proj.lora_A.weight'" in refusal(some)
    other = write_tiny_decoder(tmp_path / "wide", "llama", num_hidden_layers=3)
    assert "this base takes" in refusal(write_adapter(tmp_path / "other", other))
    for key, value in (("use_dora", True), ("peft_type", "IA3"), ("rank_pattern", {"q_proj": 2})):
        changed = tmp_path / key
        shutil.copytree(adapter, changed)
        config = json.loads((changed / "adapter_config.json").read_text())
        (changed / "adapter_config.json").write_text(json.dumps({**config, key: value}))
        assert f"has {key} {value!r}" in refusal(changed)
    (changed / "adapter_model.safetensors").write_bytes(b"short")
    (changed / "adapter_config.json").write_text(json.dumps(config | {"rank_pattern": {}}))
    assert "cannot be read" in refusal(changed)
    with pytest.raises(AdapterFolderError):
        CausalLm(_spec(base, changed))
    with pytest.raises(ValueError, match="only 'lora' is served"):
        AdapterSpec.model_validate({"type": "dora"})
    with pytest.raises(ValueError, match=r"dropout is 0\.1, but .* give 0"):
        AdapterSpec.model_validate({"dropout": 0.1})
    assert AdapterSpec.model_validate({"dropout": 0}).scale == 2.0
