"""Every family with a record: what the record says against transformers and one rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_cases import CASES, LAYERS, case_config
from support.family_jobs import REQUESTS, VOCABULARY, family_job, plain_spec
from support.parallel_training import (
    WHOLE_STEPS,
    Job,
    Trained,
    assert_agree,
    joined,
    make_trainer,
    part_of,
    record_gradients,
    train,
)
from support.rank_processes import RankContext, RankPool
from support.rollout_checks import load_trainer_model, logprob_differences
from support.slow_cases import mostly_slow
from support.tiny_families import write_tiny_decoder
from support.token_batches import score, token_batch
from support.updates import update_whole
from transformers import AutoConfig, AutoModelForCausalLM

from rolemesh.engine.layout.families import (
    DecoderShape,
    RefusedSettingError,
    UnsupportedFamilyError,
    cut_of,
)
from rolemesh.engine.layout.family_records import RECORDS
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.model_folders.model_files import ModelFolderError
from rolemesh.engine.models.buffers import saved_buffers
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.packing.packed_rows import pack_rows
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.specs import HfSpec, ModelSpec, OptimizerSpec, SamplingSpec
from rolemesh.engine.train.trainer import Trainer

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
    job = replace(family_job(folder), model=WHOLE_STEPS)
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
    job = family_job(folder)
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
            found,
            _logprobs(CausalLm(plain_spec(tmp_path / "rounded"))),
            rtol=0,
            atol=LOGPROB_TOLERANCE,
        )


def logprobs_of_rank(at: RankContext, spec: ModelSpec, layout: TrainLayout) -> torch.Tensor:
    """Log-probs of the batch, by one slice."""
    with at.connect(HybridLayout(layout)) as mesh:
        return _logprobs(CausalLm(spec, mesh=mesh))


# --- the sampler of transformers ------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_transformers_samples_what_the_trainer_scores(tmp_path: Path, name: str) -> None:
    config = {**case_config(name), "vocab_size": VOCABULARY, "eos_token_id": 2}
    folder = write_tiny_decoder(tmp_path, CASES[name][0], **config)
    # Log-probs of the folder as transformers computes them.
    _assert_scores_as_transformers(folder)
    trainer = Trainer.policy(plain_spec(folder), OptimizerSpec())
    backend = make_backend(HfSpec(dtype="float32", max_model_len=48, max_num_seqs=8), folder)
    backend.update_weights(trainer.named_weights(), 0)
    sampled = list(backend.generate(REQUESTS, SamplingSpec(max_new_tokens=24)))
    backend.close()
    differences = logprob_differences(load_trainer_model(folder), REQUESTS, sampled)
    assert float(differences.max()) < LOGPROB_TOLERANCE


# --- inside ---------------------------------------------------------------------------------


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
        _logprobs(CausalLm(plain_spec(folder))), torch.cat(expected), rtol=0, atol=LOGPROB_TOLERANCE
    )
