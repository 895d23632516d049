"""Checkpoints and exports of trainers of many ranks, in any other layout, bit by bit."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_cases import case_config
from support.parallel_training import WHOLE_STEPS, Job, Trained, joined, near_policy
from support.rank_processes import RankPool
from support.sharded_checkpoints import (
    Loaded,
    export,
    failed_save,
    killed_save,
    load,
    load_and_train,
    refused_load,
    save,
)
from support.slow_cases import mostly_slow
from support.tiny_families import write_tiny_decoder
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rolemesh.engine.experience import Experience
from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec, PpoValueLossSpec
from rolemesh.engine.train.export import export_policy
from rolemesh.engine.train.optimizers.host_moments import MOMENTS
from rolemesh.engine.train.trainer import Trainer
from rolemesh.engine.weights.checkpoints.checkpoint import CheckpointMismatchError

TENSOR_FSDP = TrainLayout(tp=2, dp=2, fsdp=2)
PIPELINE_TENSOR = TrainLayout(pp=2, tp=2)
UNEVEN_FSDP = TrainLayout(dp=3, fsdp=3)
"""Of 3 ranks, the last holds fewer rows; of the score head's single row, two hold none."""
ONE = TrainLayout()
TWO = TrainLayout(tp=2)
EIGHT = TrainLayout(pp=2, tp=2, dp=2, fsdp=2)
SHARED_EXPERTS = TrainLayout(dp=4, fsdp=4, ep=2)
MORE_SHARED = TrainLayout(tp=2, dp=4, fsdp=2, ep=4)
CUT_ROWS = TrainLayout(dp=4, cp=2, fsdp=2)
FILE_BYTES = 100_000
"""Of an export's files: a fraction of the models, and less than their embedding."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """A tied policy, by AdamW and by Muon; a critic, which has a score head; another model's."""

    def folder(seed: int, *, tied: bool, num_layers: int = 2) -> Path:
        return write_tiny_llama(
            tmp_path_factory.mktemp("llama"), seed=seed, tied=tied, num_layers=num_layers
        )

    batch = token_batch()
    tied = folder(4, tied=True)
    trainer = Trainer.policy(ModelSpec(path=tied, compute_dtype="float32"), OptimizerSpec())
    scored = near_policy(batch, trainer.compute_logprobs(batch, temperature=1.0)["logprobs"])
    policy = Job(tied, scored, PpoPolicyLossSpec(), model=WHOLE_STEPS)
    return {
        "policy": policy,
        "muon": replace(policy, optimizer={"type": "muon"}),
        "critic": replace(
            policy, folder=folder(5, tied=False), loss=PpoValueLossSpec(), kind="critic"
        ),
        "mixture": _mixture(tmp_path_factory.mktemp("mixture"), batch),
        "other": replace(policy, folder=folder(6, tied=True, num_layers=3)),
    }


def _mixture(folder: Path, batch: Experience) -> Job:
    """Experts, and a bias of them, which no gradient reaches."""
    config = {**case_config("glm4_moe"), "n_routed_experts": 8, "vocab_size": 512}
    write_tiny_decoder(folder, "glm4_moe", **config)
    trainer = Trainer.policy(ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec())
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    return Job(folder, near_policy(batch, scored), PpoPolicyLossSpec(), model=WHOLE_STEPS)


def _run(pool: RankPool, function: Callable[..., Any], job: Job, *args: Any) -> list[Any]:
    found: list[Any] = pool.run(function, job.layout.world_size, job, *args)
    return found


def _joined(loaded: list[Loaded], layout: TrainLayout) -> Trained:
    return joined([rank.part for rank in loaded], layout)


def _assert_same(found: Trained, expected: Trained) -> None:
    pairs = [(found.weights, expected.weights)]
    pairs += [(found.moments[name], expected.moments[name]) for name in MOMENTS]
    for tensors, others in pairs:
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, others[name]), name


@pytest.mark.parametrize(
    ("kind", "before", "targets"),
    mostly_slow(
        # Each layout once, as what is read or as what reads.
        range(6),
        [
            ("policy", TENSOR_FSDP, (TWO, CUT_ROWS)),
            ("critic", ONE, (UNEVEN_FSDP,)),
            ("policy", EIGHT, (PIPELINE_TENSOR, ONE)),
            ("muon", TENSOR_FSDP, (EIGHT,)),
            ("mixture", SHARED_EXPERTS, (ONE, MORE_SHARED)),
            ("policy", CUT_ROWS, (TENSOR_FSDP,)),
            ("policy", TENSOR_FSDP, (ONE, EIGHT)),
            ("policy", PIPELINE_TENSOR, (ONE, TWO, EIGHT)),
            ("critic", UNEVEN_FSDP, (ONE, TWO, EIGHT)),
            ("policy", ONE, (TENSOR_FSDP, PIPELINE_TENSOR)),
            ("critic", ONE, (EIGHT,)),
            ("muon", TENSOR_FSDP, (ONE,)),
            ("mixture", SHARED_EXPERTS, (TENSOR_FSDP,)),
            ("mixture", ONE, (SHARED_EXPERTS, MORE_SHARED)),
            ("policy", CUT_ROWS, (ONE,)),
        ],
    ),
)
def test_any_layout_loads_what_any_other_saved(
    rank_pool: RankPool,
    jobs: dict[str, Job],
    tmp_path: Path,
    kind: str,
    before: TrainLayout,
    targets: tuple[TrainLayout, ...],
) -> None:
    directory = tmp_path / "checkpoint"
    job = replace(jobs[kind], layout=before)
    saved = _run(rank_pool, save, job, directory)
    expected = _joined(saved, before)
    (step,) = {step for rank in saved for step in rank.steps.values()}
    for after in targets:
        loaded = _run(rank_pool, load, replace(job, layout=after), directory)
        _assert_same(_joined(loaded, after), expected)
        for number, rank in enumerate(loaded):
            assert rank.extra == {"kl_coefficient": 0.25, "rank": 0}
            assert rank.policy_version == saved[0].policy_version > 0
            # Of what Muon steps there is one moment, and no count.
            assert rank.steps == dict.fromkeys(rank.part.moments["exp_avg_sq"], step)
            if number < len(saved):
                assert rank.draw == saved[number].draw
        assert len({rank.draw for rank in loaded}) == len(loaded), "each has numbers of its own"


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param("policy", TENSOR_FSDP, id="tp-fsdp"),
        pytest.param("muon", TENSOR_FSDP, id="muon, tp-fsdp"),
        pytest.param("policy", PIPELINE_TENSOR, id="pp-tp", marks=pytest.mark.slow),
    ],
)
def test_ranks_go_on_from_a_checkpoint_bit_for_bit(
    rank_pool: RankPool, jobs: dict[str, Job], tmp_path: Path, kind: str, layout: TrainLayout
) -> None:
    job = replace(jobs[kind], layout=layout)
    _run(rank_pool, save, job, tmp_path / "checkpoint")
    whole = _run(rank_pool, load_and_train, job, None)
    resumed = _run(rank_pool, load_and_train, job, tmp_path / "checkpoint")
    _assert_same(_joined(resumed, layout), _joined(whole, layout))
    assert [rank.later for rank in resumed] == [rank.later for rank in whole]
    assert [rank.draw for rank in resumed] == [rank.draw for rank in whole]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_rank_killed_between_files_leaves_the_older_checkpoint(
    rank_pool: RankPool, jobs: dict[str, Job], tmp_path: Path, victim: int
) -> None:
    job = replace(jobs["policy"], layout=PIPELINE_TENSOR)
    saved = _run(rank_pool, save, job, tmp_path / "old")
    outcomes = rank_pool.outcomes(killed_save, 4, job, tmp_path / "new", victim)
    assert outcomes[victim].failure == f"died with exit code {-signal.SIGKILL}"
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert [(outcome.failure, outcome.value) for outcome in survivors] == [
        (None, "RuntimeError")
    ] * 3
    assert not (tmp_path / "new").exists()
    leftovers = {path.name.split(".tmp-")[0] for path in tmp_path.iterdir()} - {"old"}
    # Only rank 0 could have cleared up after itself.
    assert leftovers == ({"new"} if victim == 0 else set())
    loaded = _run(rank_pool, load, job, tmp_path / "old")
    _assert_same(_joined(loaded, PIPELINE_TENSOR), _joined(saved, PIPELINE_TENSOR))


@pytest.mark.parametrize("victim", [0, 2])
def test_a_full_disk_of_one_rank_fails_the_save_of_all(
    rank_pool: RankPool, jobs: dict[str, Job], tmp_path: Path, victim: int
) -> None:
    job = replace(jobs["policy"], layout=PIPELINE_TENSOR)
    for kind, message in _run(rank_pool, failed_save, job, tmp_path / "checkpoint", victim):
        assert kind == "CheckpointRoomError"
        assert "No space left on device" in message
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_with_a_checkpoint_all_ranks_say_and_nobody_changes(
    rank_pool: RankPool, jobs: dict[str, Job], tmp_path: Path
) -> None:
    job = replace(jobs["policy"], layout=PIPELINE_TENSOR)
    good = tmp_path / "good"
    _run(rank_pool, save, job, good)

    def damaged(name: str, change: Callable[[Path], object]) -> Path:
        directory = tmp_path / f"damaged-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(good, directory)
        change(directory / name)
        return directory

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    # Each of these is read by a single rank of the four.
    weights = "weights-rank00003-00001.safetensors"
    moments = "optimizer-exp_avg_sq-rank00002-00001.safetensors"
    corrupt, mismatch = "CheckpointCorruptError", "CheckpointMismatchError"
    moved = "has the moments of optimizer.type 'adamw', but this role's is 'muon'"
    cases = {
        "policy": [
            (damaged(weights, flip), corrupt, weights),
            (damaged(moments, flip), corrupt, moments),
            (damaged(weights, Path.unlink), corrupt, weights),
            (damaged("random-rank00001.json", flip), corrupt, "rank00001.json"),
            (damaged("manifest.json", flip), corrupt, "manifest.json"),
            (tmp_path / "nowhere", "ValueError", "has no manifest.json"),
        ],
        "other": [(good, mismatch, "layers")],
        "critic": [(good, mismatch, "is of a policy, not of a critic")],
        "muon": [(good, mismatch, moved)],
    }
    for loader, expected in cases.items():
        loading = replace(jobs[loader], layout=PIPELINE_TENSOR)
        outcomes = _run(rank_pool, refused_load, loading, *(one for one, *_ in expected))
        assert outcomes == [outcomes[0]] * 4
        for (directory, kind, text), (found, said, is_same) in zip(
            expected, outcomes[0], strict=True
        ):
            assert found == kind
            assert text in said
            assert is_same, f"{directory} changed a trainer"


@pytest.mark.parametrize("kind", ["policy", pytest.param("critic", marks=pytest.mark.slow)])
def test_an_export_is_the_same_in_every_layout(
    rank_pool: RankPool,
    jobs: dict[str, Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    job = replace(jobs[kind], layout=UNEVEN_FSDP)
    saved = _joined(_run(rank_pool, save, job, tmp_path / "checkpoint"), UNEVEN_FSDP)
    folders = []
    for number, layout in enumerate((ONE, TWO, TENSOR_FSDP, PIPELINE_TENSOR)):
        folders.append(tmp_path / f"export-{number}")
        arguments = (tmp_path / "checkpoint", folders[-1], "float32", FILE_BYTES)
        _run(rank_pool, export, replace(job, layout=layout), *arguments)
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    for content in contents[1:]:
        assert content.keys() == contents[0].keys()
        for name in content:
            assert content[name] == contents[0][name], name
    auto = AutoModelForCausalLM if kind == "policy" else AutoModelForTokenClassification
    model = auto.from_pretrained(folders[-1])
    assert {name for name, _ in model.named_parameters()} == saved.weights.keys()
    for name, weight in model.named_parameters():
        assert torch.equal(weight, saved.weights[name])
    files = [name for name in contents[0] if name.endswith(".safetensors")]
    index = json.loads(contents[0]["model.safetensors.index.json"])
    assert len(files) > 3
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in saved.weights.values())


def test_files_of_another_role_or_model_are_not_exported(
    rank_pool: RankPool, jobs: dict[str, Job], tmp_path: Path
) -> None:
    for kind, text in (("critic", "is of a critic, not of a policy"), ("other", "another model")):
        _run(rank_pool, save, jobs[kind], tmp_path / kind)
        with pytest.raises(CheckpointMismatchError, match=text):
            export_policy(tmp_path / kind, jobs["policy"].folder, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_an_export_narrows_weights_before_they_travel(
    rank_pool: RankPool, jobs: dict[str, Job], tmp_path: Path
) -> None:
    job = replace(jobs["policy"], layout=PIPELINE_TENSOR)
    saved = _joined(_run(rank_pool, save, job, tmp_path / "checkpoint"), PIPELINE_TENSOR)
    arguments = (tmp_path / "checkpoint", tmp_path / "model", "bfloat16", FILE_BYTES)
    _run(rank_pool, export, job, *arguments)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, weight in model.named_parameters():
        assert torch.equal(weight, saved.weights[name].bfloat16())
