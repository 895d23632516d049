"""Adapters beside stacks of experts: against PEFT and float64, on many ranks, on disk, in vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.adapted_samplers import FAR, LOGPROB, Case, differences, factors, made_sampler
from support.adapters import ALPHA, RANK, peft_model, write_adapter
from support.family_cases import case_config
from support.parallel_training import (
    WHOLE_STEPS,
    Job,
    assert_agree,
    joined,
    near_policy,
    train,
)
from support.rank_processes import RankPool
from support.rollout_checks import make_requests, tokens_by_row
from support.sharded_checkpoints import export, load, save
from support.tiny_families import write_tiny_decoder
from support.token_batches import token_batch
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.model_folders.adapter_config import (
    AdapterFolderError,
    read_adapter_config,
    spec_of,
)
from rolemesh.engine.model_folders.model_files import ModelFolderError
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.packing.packed_rows import PackedRows, pack_rows
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.specs import (
    AdapterSpec,
    HfSpec,
    ModelSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    SamplingSpec,
    VllmSpec,
)
from rolemesh.engine.train.export import export_policy
from rolemesh.engine.train.trainer import Trainer

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
BOTH = {
    # By name: of a mixture PEFT's "all-linear" means the router too, and twice the rank for stacks.
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "target_parameters": STACKS,
}
ALONE = {"target_modules": [], "target_parameters": STACKS, "use_rslora": True}
TARGETS = ("all_linear", "experts")
FLOAT32_TOLERANCE = 3e-6
"""Relative, of the norm of a gradient; as in test_adapters."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four experts in each layer, so that ranks can share them out."""
    config = {
        **case_config("qwen3_moe"),
        "num_experts": 4,
        "mlp_only_layers": [],
        "vocab_size": 512,
    }
    return write_tiny_decoder(tmp_path_factory.mktemp("mixture"), "qwen3_moe", **config)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of PEFT, with a B that is not zero."""
    return write_adapter(tmp_path_factory.mktemp("adapter"), base, **BOTH)


def _section(**fields: Any) -> dict[str, Any]:
    return {"rank": RANK, "alpha": ALPHA, "targets": TARGETS, **fields}


def _model(base: Path, **section: Any) -> CausalLm:
    return CausalLm(
        ModelSpec.model_validate(
            {"path": base, "compute_dtype": "float32", "adapter": _section(**section)}
        )
    )


def _logprobs(model: CausalLm, rows: PackedRows) -> torch.Tensor:
    return model.finish(model.stage_forward(rows, None), rows, temperature=1.0).logprobs_N


def _scored(logits_BTV: torch.Tensor) -> torch.Tensor:
    """Log-probs of the completion tokens of the batch, floating [N], by the plainest means."""
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


def _as_laid_by_peft(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A stack as PEFT's documentation has it, by a loop over experts."""
    if tensor.ndim < 3:
        return tensor
    if name.endswith("lora_A.weight"):
        return torch.cat(list(tensor))
    number, height, rank = tensor.shape
    laid = tensor.new_empty(height, rank * number)
    for expert in range(number):
        for row in range(rank):
            laid[:, row * number + expert] = tensor[expert, :, row]
    return laid


@pytest.mark.parametrize("config", [BOTH, ALONE], ids=["all", "experts alone"])
def test_outputs_and_gradients_are_those_of_peft_and_of_float64(
    base: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = write_adapter(tmp_path, base, **config)
    fields = {} if config is BOTH else {"targets": ("experts",), "scaling": "rslora"}
    model = _model(base, **fields, **{"from": folder})
    rows = pack_rows(token_batch(), model.device)
    weights_N = torch.randn(len(rows.targets_U), generator=torch.Generator().manual_seed(2))
    logprobs_N = _logprobs(model, rows)
    (logprobs_N * weights_N).sum().backward()

    theirs = peft_model(base, **config)
    expected_N = _scored(theirs(input_ids=rows.rectangle().tokens_BT).logits)
    (expected_N * weights_N).sum().backward()
    torch.testing.assert_close(logprobs_N, expected_N, rtol=0, atol=2e-5)
    expected = {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.grad is not None
    }
    wide = _float64_gradients(base, folder, rows, weights_N, model.spec.adapter)
    found = dict(model.trained_weights())
    assert found.keys() == expected.keys() == wide.keys()
    for name, weight in found.items():
        assert weight.grad is not None
        assert weight.grad.abs().max() > 0, name
        gradient = _as_laid_by_peft(name, weight.grad)
        for other in (expected[name], wide[name]):
            apart = (gradient.double() - other.double()).norm() / other.double().norm()
            assert apart < FLOAT32_TOLERANCE, name


def _float64_gradients(
    base: Path,
    folder: Path,
    rows: PackedRows,
    weights_N: torch.Tensor,
    spec: AdapterSpec | None,
) -> dict[str, torch.Tensor]:
    """Of the factors as PEFT lays them, through W + s B A of a plain model in float64."""
    assert spec is not None
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64).eval()
    lm.set_experts_implementation("eager")
    held = {
        name.removeprefix("base_model.model."): values.double().requires_grad_()
        for name, values in load_file(folder / "adapter_model.safetensors").items()
    }
    merged = {name: weight.detach() for name, weight in lm.named_parameters()}
    for name, a in held.items():
        module = name.removesuffix(".lora_A.weight")
        if module == name:
            continue
        b = held[f"{module}.lora_B.weight"]
        layer, _, inside = module.partition(".mlp.experts")
        if inside or module.endswith(".mlp.experts"):
            stack = STACKS[0] if inside else STACKS[1]
            number = len(merged[f"{layer}.{stack}"])
            by_expert = [
                b[:, expert::number] @ a[expert * RANK : (expert + 1) * RANK]
                for expert in range(number)
            ]
            merged[f"{layer}.{stack}"] = merged[f"{layer}.{stack}"] + spec.scale * torch.stack(
                by_expert
            )
        else:
            merged[f"{module}.weight"] = merged[f"{module}.weight"] + spec.scale * b @ a
    logits_BTV = functional_call(lm, merged, (rows.rectangle().tokens_BT,)).logits
    (_scored(logits_BTV) * weights_N.double()).sum().backward()
    return {name: factor.grad for name, factor in held.items() if factor.grad is not None}


# --- many ranks -------------------------------------------------------------------------------

LAYOUTS = {
    "all ways": TrainLayout(tp=2, pp=2, dp=2, fsdp=2, ep=2),
    "ep4 fsdp2": TrainLayout(dp=4, ep=4, fsdp=2),
}


@pytest.fixture(scope="module")
def job(base: Path, adapter: Path) -> Job:
    """Three steps from PEFT's adapter."""
    batch = token_batch()
    trainer = Trainer.policy(
        ModelSpec.model_validate(
            {"path": base, "compute_dtype": "float32", "adapter": _section(**{"from": adapter})}
        ),
        OptimizerSpec(),
    )
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    return Job(
        base,
        near_policy(batch, scored),
        PpoPolicyLossSpec(kl_in_loss=0.1),
        model={"adapter": _section(**{"from": adapter}), **WHOLE_STEPS},
    )


@pytest.mark.parametrize("name", ["all ways", pytest.param("ep4 fsdp2", marks=pytest.mark.slow)])
def test_ranks_train_as_one(rank_pool: RankPool, job: Job, name: str) -> None:
    layout = LAYOUTS[name]
    alone = joined(rank_pool.run(train, 1, job), TrainLayout())
    spread = replace(job, layout=layout)
    assert_agree(joined(rank_pool.run(train, layout.world_size, spread), layout), alone)


def test_what_many_ranks_save_loads_elsewhere_and_in_peft_and_merges_as_there(
    rank_pool: RankPool, job: Job, base: Path, tmp_path: Path
) -> None:
    many = replace(job, layout=LAYOUTS["all ways"])
    rank_pool.run(save, 8, many, tmp_path / "checkpoint")
    for name, one in (("many", many), ("one", job)):
        size = one.layout.world_size
        rank_pool.run(load, size, one, tmp_path / "checkpoint")
        rank_pool.run(export, size, one, tmp_path / "checkpoint", tmp_path / name, None, 5000)
    export_policy(tmp_path / "checkpoint", base, tmp_path / "again")
    file = "adapter_model.safetensors"
    stored = [(tmp_path / name / file).read_bytes() for name in ("many", "one", "again")]
    assert stored[0] == stored[1] == stored[2]
    found = spec_of(read_adapter_config(tmp_path / "many"), field="from", path=tmp_path / "many")
    assert set(found.targets) == {"experts", "q_proj", "k_proj", "v_proj", "o_proj"}

    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(lm, tmp_path / "many").eval()
    model = _model(base, **{"from": tmp_path / "many"})
    rows = pack_rows(token_batch(), model.device)
    with torch.no_grad():
        expected_N = _scored(theirs(input_ids=rows.rectangle().tokens_BT).logits)
        torch.testing.assert_close(_logprobs(model, rows), expected_N, rtol=0, atol=2e-5)
    export_policy(tmp_path / "checkpoint", base, tmp_path / "merged", "float32", merges=True)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    merged = theirs.merge_and_unload()
    for name, weight in ours.named_parameters():
        # PEFT adds a stack in one product of its own order.
        torch.testing.assert_close(weight, merged.get_parameter(name), rtol=0, atol=1e-6)


@pytest.mark.parametrize("targets", [("all_linear",), TARGETS], ids=["linear", "with experts"])
def test_peft_has_factors_of_dense_mlps_and_shared_experts(
    tmp_path: Path, targets: tuple[str, ...]
) -> None:
    # As modules PEFT 0.21 takes their names for those of experts, warns, and leaves them out.
    base = write_tiny_decoder(tmp_path / "base", "glm4_moe", **case_config("glm4_moe"))
    section = _section(targets=targets)
    trainer = Trainer.policy(
        ModelSpec.model_validate({"path": base, "compute_dtype": "float32", "adapter": section}),
        OptimizerSpec(),
    )
    with torch.no_grad():
        for name, factor in trainer.model.trained_weights():
            if "lora_B" in name:
                factor.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    trainer.export(tmp_path / "adapter")
    model = _model(base, targets=targets, **{"from": tmp_path / "adapter"})
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokens_BT = torch.tensor([list(range(3, 20))])
    with torch.no_grad():
        before_BTV = lm(input_ids=tokens_BT).logits
        theirs = peft.PeftModel.from_pretrained(lm, tmp_path / "adapter").eval()
        found_BTV = model.lm(input_ids=tokens_BT).logits
        torch.testing.assert_close(found_BTV, theirs(input_ids=tokens_BT).logits, rtol=0, atol=2e-5)
    assert (found_BTV - before_BTV).abs().max() > 0.1


# --- the sampler ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case() -> Case:
    return Case("merged", "float32", "qwen3_moe", AdapterSpec(rank=4, alpha=8.0, targets=TARGETS))


def test_vllm_and_hf_sample_with_the_trainers_adapter(case: Case, tmp_path: Path) -> None:
    requests = make_requests(8)
    with made_sampler(case, tmp_path / "model") as sampler:
        oracle = make_backend(HfSpec(max_model_len=128), sampler.folder, adapter=case.adapter)
        older = None
        # The first update loads every weight, later ones write stacks anew and have them packed.
        for version, seed in enumerate((1, 2)):
            model = sampler.trainer(seed)
            greedy = []
            for backend in (sampler.backend, oracle):
                backend.update_weights(factors(model).items(), version)
                sampled = list(backend.generate(requests, SamplingSpec(max_new_tokens=20)))
                assert differences(model, requests, sampled).max() < LOGPROB
                if older is not None:
                    assert differences(older, requests, sampled).mean() > FAR
                likeliest = SamplingSpec(greedy=True, max_new_tokens=20)
                greedy.append(tokens_by_row(backend.generate(requests, likeliest)))
            assert greedy[0] == greedy[1]
            assert sampler.backend.weight_checksums() == oracle.weight_checksums()
            older = model
        assert sampler.backend._served._matrices is not None  # type: ignore[union-attr]


# --- bad input --------------------------------------------------------------------------------


def _refused(base: Path, **section: Any) -> Iterator[str]:
    with pytest.raises((AdapterFolderError, ModelFolderError, ValueError)) as caught:
        _model(base, **section)
    yield str(caught.value)


def test_what_is_not_served_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    half = write_adapter(tmp_path / "half", base, **{**BOTH, "target_parameters": STACKS[:1]})
    (told,) = _refused(base, **{"from": half})
    assert "target_parameters ['mlp.experts.gate_up_proj']" in told
    assert "give one that was made for both" in told
    dense = write_tiny_decoder(tmp_path / "dense", "qwen3")
    (told,) = _refused(dense)
    assert "adapter.targets has 'experts', but the layers of this model have no such matrix" in told
    (told,) = _refused(base, rank=40)
    assert "adapter.rank is 40" in told
    spec = VllmSpec.model_validate({"dtype": "float32", "adapters": "slots", "max_model_len": 128})
    with pytest.raises(ValueError, match=r"targets has experts.*give rollout\.activations float32"):
        make_backend(spec, base, adapter=AdapterSpec.model_validate(_section()))
