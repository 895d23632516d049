"""Every family with a record: what the record says against transformers, one rank and vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_cases import CASES, IN_VLLM, LAYERS, case_config
from support.parallel_training import (
    WHOLE_STEPS,
    Job,
    Trained,
    assert_agree,
    joined,
    make_trainer,
    near_policy,
    part_of,
    record_gradients,
    train,
)
from support.rank_processes import RankContext, RankPool
from support.rollout_checks import (
    load_trainer_model,
    logprob_differences,
    set_stop_tokens,
    short_requests,
)
from support.sampler_shards import PADDING, folder_weights, rank_shard, shard_tensors
from support.slow_cases import mostly_slow
from support.tiny_families import write_tiny_decoder
from support.token_batches import score, token_batch
from support.updates import update_whole
from transformers import AutoConfig, AutoModelForCausalLM

from rolemesh.engine.layout.boxes import generate_layout
from rolemesh.engine.layout.families import (
    DecoderShape,
    RefusedSettingError,
    UnsupportedFamilyError,
    cut_of,
)
from rolemesh.engine.layout.family_records import RECORDS
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.model_folders.model_files import ModelFolderError
from rolemesh.engine.models.buffers import saved_buffers
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.packing.packed_rows import pack_rows
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import (
    HfSpec,
    ModelSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    SamplingSpec,
    VllmSpec,
)
from rolemesh.engine.train.trainer import Trainer

VOCABULARY = 190
"""Padded to 192: the last slice has fewer rows."""
REQUESTS = short_requests(VOCABULARY)
LOSS = PpoPolicyLossSpec(entropy_coefficient=0.01, kl_in_loss=0.1)
LAYOUTS = {
    "tp2-pp2": TrainLayout(tp=2, pp=2),
    "tp2": TrainLayout(tp=2),
    "pp2": TrainLayout(pp=2),
    "fsdp2": TrainLayout(dp=2, fsdp=2),
}
PROVED = (
    # Made of parts that other cases train, without a field that a stage or a slice heeds.
    *("granite with biases", "mistral", "qwen2", "ministral3", "olmo3", "gemma2", "olmoe"),
    # test_images.py trains both in more layouts.
    *("qwen2_5_vl_text", "qwen3_vl_text"),
)
"""Those that `make test` trains on one rank alone."""


def _trained() -> Iterator[Any]:
    """Each case cut both ways at once, and each way by itself."""
    for name in CASES:
        for layout in LAYOUTS:
            is_quick = layout == "tp2-pp2" and name not in PROVED
            yield pytest.param(name, layout, marks=() if is_quick else pytest.mark.slow)


FURTHER: dict[str, tuple[TrainLayout, dict[str, Any], dict[str, Any]]] = {
    "tokens shared": (TrainLayout(tp=2), {}, {"sequence_parallel": True}),
    "tp4": (TrainLayout(tp=4), {}, {}),
    "all ways": (TrainLayout(tp=2, pp=2, dp=2, fsdp=2), {}, {}),
    "cp4": (TrainLayout(dp=4, cp=4), {}, {}),
    "adapter": (TrainLayout(tp=2, pp=2, dp=2, fsdp=2), {"adapter": {"rank": 2}}, {}),
}
"""Layouts, and fields of the ModelSpec: of one rank and of many, and of many alone."""
PAIRS = [(case, name) for case in FURTHER for name in CASES]
QUICK = [("all ways", "phi3"), ("tp4", "olmo2"), ("adapter", "glm4"), ("cp4", "qwen3")]
"""Those that `make test` makes: parts of fused files, a norm over keys that slices share, factors
beside fused matrices, and layers with windows over rows that are cut."""
LOGPROB_TOLERANCE = 2e-5
"""Of our log-probs to those of transformers' logits: float32, summed in another order."""
VLLM_TOLERANCE = 5e-7
"""Mean abs difference of a token: float32 through three narrow layers, in two programs."""
SLICES_TOLERANCE = 1e-6
"""The same with sums over two slices. Measured: 1.7e-7 to 4.9e-7."""
LEAST_MOVE = 1e-4
"""The same between the weights before and after an update: an update that was lost would show."""
LOAD_TIMEOUT_S = 300.0

SAMPLED = {"vocab_size": VOCABULARY, "head_dim": 32, "hidden_size": 128, "intermediate_size": 96}
"""Sizes that vLLM's kernels for a CPU take."""
NOT_IN_VLLM = {"qwen3": {"use_sliding_window": False, "layer_types": None}}
"""What it refuses by itself of a case: windows on some layers alone."""
FAST = ("ministral3", "phi3")
"""Those with which `make test` starts vLLM: a field that it lacks, and fused files."""


def test_every_record_has_a_case() -> None:
    assert {family for family, _ in CASES.values()} == set(RECORDS)


# --- the record against transformers --------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_model_of_transformers_has_the_parameters_of_the_record(name: str) -> None:
    config = AutoConfig.for_model(CASES[name][0], **{**_sizes(), **case_config(name)})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    expected = [(key, tuple(one.shape)) for key, one in model.named_parameters()]
    buffers = [(key, tuple(one.shape)) for key, one in saved_buffers(model)]
    shape = DecoderShape.from_config(config.to_dict())
    found = [(key, one.shape) for key, one in shape.manifest("float32").items()]
    assert [one for one in found if not shape.is_buffer(one[0])] == expected
    assert [one for one in found if shape.is_buffer(one[0])] == buffers
    # What a config lists by layer is what the record says, so that no list is cut unawares.
    lists = {
        key
        for key, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == LAYERS and "token_id" not in key
    }
    assert lists == set(shape.record.per_layer)
    for given in ("self_attn.rotary_proj.weight", "mlp.experts.0.up_proj.weight"):
        with pytest.raises(UnsupportedFamilyError, match=f"layers.1.{given}.*{shape.family}"):
            cut_of(shape, f"model.layers.1.{given}")


@pytest.mark.parametrize("family", RECORDS)
def test_a_config_that_leaves_fields_out_means_what_transformers_means(family: str) -> None:
    raw = {
        **{key: value for key, value in _sizes().items() if "head_dim" not in key},
        **dict.fromkeys(RECORDS[family].refused),
        "model_type": family,
    }
    for key in ("num_key_value_heads", "tie_word_embeddings"):
        del raw[key]
    raw |= {"num_attention_heads": 32, "hidden_size": 64}
    config = AutoConfig.for_model(**raw)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    found = DecoderShape.from_config(raw).manifest("float32")
    assert {key: one.shape for key, one in found.items()} == {
        key: tuple(one.shape) for key, one in (*model.named_parameters(), *saved_buffers(model))
    }


@pytest.mark.parametrize(
    ("family", "setting"),
    [(family, name) for family, record in RECORDS.items() for name in record.refused],
)
def test_what_nothing_here_computes_is_refused_by_name(
    tmp_path: Path, family: str, setting: str
) -> None:
    words = f"the {family} model has {setting} .*: take another model"
    config = {**_sizes(), **case_config(family), "model_type": family, setting: 7.0}
    with pytest.raises(RefusedSettingError, match=words):
        DecoderShape.from_config(config)
    folder = write_tiny_decoder(tmp_path, family, **case_config(family))
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), setting: 7.0}))
    # On one rank, too.
    with pytest.raises(ModelFolderError, match=words):
        CausalLm(ModelSpec(path=folder))


# --- ranks against one rank, and exports ----------------------------------------------------


def train_and_export(at: RankContext, job: Job, folder: Path) -> Trained:
    """The job's steps as one rank, and the trained model's folder."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        gradients = record_gradients(trainer)
        metrics = update_whole(
            trainer, job.batch, job.loss, epochs=1, mini_batch_rows=job.mini_batch_rows, seed=5
        )
        trainer.export(folder, "float32")
        return part_of(trainer, metrics, gradients)


@pytest.mark.parametrize(("name", "layout_name"), list(_trained()))
def test_ranks_train_as_one_and_their_export_loads(
    rank_pool: RankPool, tmp_path: Path, name: str, layout_name: str
) -> None:
    folder = write_tiny_decoder(
        tmp_path / "model", CASES[name][0], vocab_size=VOCABULARY, **case_config(name)
    )
    layout, export = LAYOUTS[layout_name], tmp_path / "export"
    job = replace(_job(folder), model=WHOLE_STEPS)
    alone = joined(rank_pool.run(train, 1, job), TrainLayout())
    parts = rank_pool.run(train_and_export, layout.world_size, replace(job, layout=layout), export)
    trained = joined(parts, layout)
    assert_agree(trained, alone)
    loaded = load_trainer_model(export)
    weights = {**dict(loaded.named_parameters()), **dict(saved_buffers(loaded))}
    assert weights.keys() == alone.weights.keys()
    assert all(torch.equal(weight, trained.weights[key]) for key, weight in weights.items())
    # The export's config is whole as well: every layer, and both ends' factors.
    _assert_scores_as_transformers(export)
    told = [json.loads((one / "config.json").read_text()) for one in (folder, export)]
    assert told[0] == {**told[1], "dtype": told[0].get("dtype")}


@pytest.mark.parametrize(
    ("case", "name"),
    mostly_slow(
        [number for number, pair in enumerate(PAIRS) if pair in QUICK],
        PAIRS,
    ),
)
def test_ranks_train_as_one_in_further_layouts(
    rank_pool: RankPool, tmp_path: Path, case: str, name: str
) -> None:
    folder = write_tiny_decoder(
        tmp_path, CASES[name][0], vocab_size=VOCABULARY, **case_config(name)
    )
    job = _job(folder)
    layout, of_both, of_ranks = FURTHER[case]
    job = replace(job, model=WHOLE_STEPS | of_both)
    alone = joined(rank_pool.run(train, 1, job), TrainLayout())
    spread = replace(job, layout=layout, model=WHOLE_STEPS | of_both | of_ranks)
    if case == "tp4" and any(part.cut == "qkv" for part in RECORDS[CASES[name][0]].parts):
        with pytest.raises(AssertionError, match="tp 4 is more than num_key_value_heads 2"):
            rank_pool.run(train, layout.world_size, spread)
        return
    found = joined(rank_pool.run(train, layout.world_size, spread), layout)
    assert_agree(found, alone)


@pytest.mark.parametrize("name", ["granite", "gemma3_text", "olmo2"])
def test_rounded_weights_are_those_of_a_rounded_folder(
    rank_pool: RankPool, tmp_path: Path, name: str
) -> None:
    """What multiplies a rounded weight is no part of it: the factors of both ends, norms."""
    folder = write_tiny_decoder(
        tmp_path / "model", CASES[name][0], vocab_size=VOCABULARY, **case_config(name)
    )
    model = load_trainer_model(folder)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    model.save_pretrained(tmp_path / "rounded")
    spec = ModelSpec(path=folder, compute_dtype="bfloat16")
    for found in rank_pool.run(logprobs_of_rank, 2, spec, TrainLayout(tp=2)):
        torch.testing.assert_close(
            found, _logprobs(CausalLm(_spec(tmp_path / "rounded"))), rtol=0, atol=LOGPROB_TOLERANCE
        )


def logprobs_of_rank(at: RankContext, spec: ModelSpec, layout: TrainLayout) -> torch.Tensor:
    """Log-probs of the batch, by one slice."""
    with at.connect(HybridLayout(layout)) as mesh:
        return _logprobs(CausalLm(spec, mesh=mesh))


# --- samplers -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_transformers_samples_what_the_trainer_scores(tmp_path: Path, name: str) -> None:
    config = {**case_config(name), "vocab_size": VOCABULARY, "eos_token_id": 2}
    folder = write_tiny_decoder(tmp_path, CASES[name][0], **config)
    # Log-probs of the folder as transformers computes them.
    _assert_scores_as_transformers(folder)
    trainer = Trainer.policy(_spec(folder), OptimizerSpec())
    backend = make_backend(HfSpec(dtype="float32", max_model_len=48, max_num_seqs=8), folder)
    backend.update_weights(trainer.named_weights(), 0)
    sampled = list(backend.generate(REQUESTS, SamplingSpec(max_new_tokens=24)))
    backend.close()
    differences = logprob_differences(load_trainer_model(folder), REQUESTS, sampled)
    assert float(differences.max()) < LOGPROB_TOLERANCE


@dataclass
class Sampled:
    """What vLLM did with the weights of a trainer, before and after a step."""

    differences: list[float]
    moved: float
    """Between what was sampled after the step and the weights before it."""
    parameters: dict[str, tuple[int, ...]]
    """VLLM's own, by its names."""
    placed_is_equal: bool
    """Whether parts in vLLM's own shapes and names make of it what whole weights made."""
    padding: float
    """The largest number in the rows by which vLLM fills up its vocabulary."""
    export_is_equal: bool
    """Whether vLLM holds of the export what it held after the step; true where it was not asked."""


def sample_updates(at: RankContext, folder: Path, export: Path | None) -> Sampled:
    """Trains a step in the process of a sampler, and compares what is sampled."""
    from rolemesh.engine.rollout.vllm.weights.shards import weight_places

    trainer = Trainer.policy(
        ModelSpec(path=folder, compute_dtype="float32"),
        OptimizerSpec(learning_rate=1e-3, max_grad_norm=100.0),
    )
    spec = VllmSpec(dtype="float32", max_model_len=48, max_num_seqs=8)
    backend = VllmBackend(spec, folder)
    try:
        differences = []
        moved = 0.0
        model = load_trainer_model(folder)
        for number in range(2):
            backend.update_weights(trainer.named_weights(), trainer.policy_version)
            sampled = list(backend.generate(REQUESTS, SamplingSpec(max_new_tokens=24)))
            if number:
                moved = float(logprob_differences(model, REQUESTS, sampled).mean())
                state = {key: one.clone() for key, one in trainer.named_weights()}
                assert not model.load_state_dict(state, strict=False).unexpected_keys
                model.tie_weights()
            differences.append(float(logprob_differences(model, REQUESTS, sampled).mean()))
            if not number:
                job = _job(folder)
                update_whole(trainer, job.batch, LOSS, epochs=1, mini_batch_rows=8, seed=5)
        (places,) = backend.engine.apply_model(
            lambda model: {
                name: place.shape for name, place in weight_places(model, torch.float32).items()
            }
        )
        checksums = dict(backend.weight_checksums())
        weights = {key: one.clone() for key, one in trainer.named_weights()}
        backend.engine.apply_model(lambda model: padding_of(model).fill_(PADDING))
        backend.update_weights(((key, torch.zeros_like(one)) for key, one in weights.items()), 2)
        paddings = backend.engine.apply_model(largest_padding)
        backend.update_shard(shard_tensors(rank_shard(folder), weights), 3)
        placed_is_equal = dict(backend.weight_checksums()) == checksums
        paddings += backend.engine.apply_model(largest_padding)
    finally:
        backend.close()
    is_equal = True
    if export is not None:
        trainer.export(export, "float32")
        backend = VllmBackend(spec, export, folder_version=1)
        try:
            is_equal = dict(backend.weight_checksums()) == checksums
        finally:
            backend.close()
    return Sampled(differences, moved, places, placed_is_equal, max(paddings), is_equal)


def largest_padding(model: Any) -> float:
    """What stands in the embedding's padded rows."""
    return float(padding_of(model).abs().max())


def padding_of(model: Any) -> torch.Tensor:
    """The embedding's padded rows."""
    (weight,) = (one for name, one in model.named_parameters() if "embed_tokens.weight" in name)
    rows: torch.Tensor = weight.detach()[VOCABULARY:]
    return rows


@pytest.fixture(scope="module")
def process() -> Iterator[RankPool]:
    # Not the session's: a process that has imported vLLM is two gigabytes larger.
    with RankPool(1) as pool:
        yield pool


@pytest.mark.parametrize(
    ("name", "loads"),
    [
        # An engine more takes seconds: `make test` loads that export whose config vLLM completes.
        *((name, name == "ministral3") for name in FAST),
        *(
            pytest.param(name, True, marks=pytest.mark.slow)
            for name in IN_VLLM
            if name != "ministral3"
        ),
    ],
)
def test_vllm_computes_with_each_update_and_loads_the_export(
    process: RankPool, tmp_path: Path, name: str, loads: bool
) -> None:
    folder, export = _write_sampled(tmp_path / "model", name), tmp_path / "export"
    (found,) = process.run(
        sample_updates, 1, folder, export if loads else None, timeout_s=LOAD_TIMEOUT_S
    )
    assert max(found.differences) < VLLM_TOLERANCE
    assert found.moved > LEAST_MOVE
    assert found.export_is_equal
    # Its names and shapes are those to which ranks send their parts.
    shape = DecoderShape.from_config(json.loads((folder / "config.json").read_text()))
    one = generate_layout(shape, HybridLayout(TrainLayout(), GenerateLayout()), "float32")
    assert found.parameters == dict(one.ranks[0].shapes)
    assert found.placed_is_equal
    assert found.padding == 0.0 != PADDING


def sample_in_slices(at: RankContext, folder: Path) -> list[float]:
    """Differences of what two slices sample: with whole weights, and with parts of them."""
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=2))
    with at.connect(layout, timeout_s=LOAD_TIMEOUT_S) as mesh:
        spec = VllmSpec(dtype="float32", max_model_len=48, max_num_seqs=8)
        backend = VllmBackend(spec, folder, mesh)
        try:
            weights, model = folder_weights(folder), load_trainer_model(folder)
            differences = []

            def compare() -> dict[str, str]:
                sampled = list(backend.generate(REQUESTS, SamplingSpec(max_new_tokens=24)))
                differences.append(float(logprob_differences(model, REQUESTS, sampled).mean()))
                return dict(backend.weight_checksums())

            backend.update_weights(weights.items(), 1)
            loaded = compare()
            backend.update_weights(((key, torch.zeros_like(t)) for key, t in weights.items()), 2)
            shard = rank_shard(folder, layout, mesh.rank)
            backend.update_shard(shard_tensors(shard, weights), 3)
            assert compare() == loaded
            return differences
        finally:
            backend.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_VLLM)
def test_two_slices_of_vllm_sample_as_one_model(
    processes: RankPool, tmp_path: Path, name: str
) -> None:
    folder = _write_sampled(tmp_path, name)
    for found in processes.run(sample_in_slices, 2, folder, timeout_s=LOAD_TIMEOUT_S):
        assert max(found) < SLICES_TOLERANCE


# --- inside ---------------------------------------------------------------------------------


def _write_sampled(directory: Path, name: str) -> Path:
    """The model of a case, with sizes and settings that vLLM takes."""
    config = {**case_config(name), **SAMPLED, **NOT_IN_VLLM.get(name, {})}
    if "moe_intermediate_size" in config:
        # No multiple of the 32 outputs that vLLM's kernel takes at a time: it pads them.
        config["moe_intermediate_size"] = 48 if name == "glm4_moe" else 64
    config["initializer_range"] = 0.05
    folder = write_tiny_decoder(directory, CASES[name][0], **config)
    set_stop_tokens(folder, (2, 3))
    return folder


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }


def _spec(folder: Path) -> ModelSpec:
    return ModelSpec(path=folder, compute_dtype="float32")


def _job(folder: Path) -> Job:
    batch = token_batch(vocab_size=VOCABULARY)
    trainer = Trainer.policy(_spec(folder), OptimizerSpec())
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    return Job(folder, near_policy(batch, scored), LOSS)


def _logprobs(model: CausalLm) -> torch.Tensor:
    rows = pack_rows(token_batch(vocab_size=VOCABULARY), "cpu")
    with torch.no_grad():
        return score(model, rows, temperature=0.8)[0]


@torch.no_grad()
def _assert_scores_as_transformers(folder: Path) -> None:
    """Log-probs of each completion token, one row at a time and without padding."""
    batch = token_batch(vocab_size=VOCABULARY)
    model = load_trainer_model(folder)
    expected = []
    for row, prompt in zip(
        batch["tokens"].rows(), batch["prompt_lengths"].values.tolist(), strict=True
    ):
        logits_TV = model(row[None]).logits[0] / 0.8
        chosen = logits_TV[prompt - 1 : -1].log_softmax(-1)
        expected.append(chosen.gather(-1, row[prompt:, None])[:, 0])
    torch.testing.assert_close(
        _logprobs(CausalLm(_spec(folder))), torch.cat(expected), rtol=0, atol=LOGPROB_TOLERANCE
    )
