"""The judge of form: tells its kinds apart, is a reward source, and repeats by seed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.tiny_models import write_tiny_llama

from rolemesh.engine.experience import Column, Experience
from rolemesh.engine.model_folders.model_files import ModelFolderError
from rolemesh.engine.rewards.sources import make_reward
from rolemesh.engine.specs import ClassifierRewardSpec, ModelSpec
from rolemesh.engine.weights.checkpoints.folders import FolderExistsError
from rolemesh.quickstart import form_judge
from rolemesh.quickstart.form_examples import KINDS, NUMBER_KINDS, completion
from rolemesh.quickstart.form_judge import JudgeTraining, write_judge

QUICK = JudgeTraining(num_layers=1, steps=1, rows_per_step=2, draws_per_kind=1)
"""Trains next to nothing."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", seed=3)


def silent(line: str) -> None:
    """Drops a line of progress."""


# --- examples -----------------------------------------------------------------------------


@pytest.mark.parametrize("held_out", [False, True])
def test_only_the_number_kinds_are_bare_numbers_and_nothing_more(held_out: bool) -> None:
    draw = random.Random(0)
    for kind in KINDS:
        for _ in range(300):
            text = completion(kind, draw, held_out=held_out)
            bare = text.removeprefix(" ")
            is_number = bare.isdecimal() and len(bare) <= 3
            assert is_number == (kind in NUMBER_KINDS), (kind, text)


def test_held_out_numbers_and_words_are_never_trained_on() -> None:
    draw = random.Random(0)
    for kind in ("number", "words"):
        seen, unseen = (
            {
                word
                for _ in range(2000)
                for word in completion(kind, draw, held_out=held_out).strip(" .").split()
            }
            for held_out in (False, True)
        )
        assert seen.isdisjoint(unseen)
        assert min(len(seen), len(unseen)) > 20


# --- the judge ----------------------------------------------------------------------------


@pytest.fixture
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte-level tokenizer makes the real prompts four times as long as SmolLM2's does."""
    short = {"system_prompt": None, "question_template": "?", "train_size": 32, "held_out_size": 8}
    monkeypatch.setattr(form_judge, "PROMPTS", form_judge.PROMPTS.model_copy(update=short))


TINY = JudgeTraining(
    num_layers=2,
    steps=50,
    rows_per_step=48,
    learning_rate=5e-3,
    draws_per_kind=20,
    # Measured 0.95 for the worst kind after these steps. Untrained, all texts score about alike, so
    # that some kind is judged wrong nearly always.
    min_accuracy=0.75,
)


@pytest.mark.slow
def test_a_trained_judge_tells_every_kind_apart_and_is_a_reward_source(
    model: Path, short_prompts: None, tmp_path: Path
) -> None:
    folder = tmp_path / "judge"
    accuracy = write_judge(folder, model=model, training=TINY, report=silent)
    assert accuracy is not None
    assert set(accuracy) == set(KINDS)
    assert min(accuracy.values()) >= TINY.min_accuracy
    assert json.loads((folder / form_judge.REPORT_FILE).read_text())["held_out_accuracy"] == (
        accuracy
    )
    # An independent look, through the reward that a recipe names.
    source = make_reward(ClassifierRewardSpec(model=ModelSpec(path=folder)), torch.device("cpu"))
    prompt = "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n12 + 30 ="
    good = [" 42", " 7", "158", " 11"]
    bad = [" 42.", "", " the sum is 42", " 42\n\nThe answer", " 12 + 30 = 42", " 42 43 44"]
    batch = Experience(
        {
            "prompt_text": Column.text([prompt] * len(good + bad)),
            "completion_text": Column.text(good + bad),
        }
    )
    rewards = source.score(batch, lambda stage, done, total: None)
    assert float(rewards[: len(good)].mean()) > float(rewards[len(good) :].mean()) + 0.5
    # Made once: a second call finds it and trains nothing.
    assert write_judge(folder, model=model, training=TINY, report=silent) is None


def test_equal_seeds_give_equal_weights(
    model: Path, short_prompts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form_judge, "_refuse_weak", lambda accuracy, least: None)
    weights = []
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        write_judge(tmp_path / name, model=model, seed=seed, training=QUICK, report=silent)
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    first, again, other = weights
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["score.weight"], other["score.weight"])


def test_a_weak_judge_is_named_by_kind_and_not_written(
    model: Path, short_prompts: None, tmp_path: Path
) -> None:
    weak = JudgeTraining(num_layers=1, steps=1, rows_per_step=2, draws_per_kind=4)
    # One score for all texts, or nearly so: some kind is on the wrong side of it.
    with pytest.raises(ValueError, match="held-out accuracy is below") as caught:
        write_judge(tmp_path / "judge", model=model, training=weak, report=silent)
    assert "--steps" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_refused_with_its_remedy(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="steps is 0"):
        JudgeTraining(steps=0)
    with pytest.raises(ValueError, match="num_layers is 3, but the model in"):
        write_judge(tmp_path / "judge", model=model, report=silent)
    with pytest.raises(ModelFolderError, match="does not exist"):
        write_judge(tmp_path / "judge", model=tmp_path / "nowhere", report=silent)
    (tmp_path / "mine").mkdir()
    with pytest.raises(FolderExistsError, match="something else than a judge"):
        write_judge(tmp_path / "mine", model=model, report=silent)
    arguments = ["--model", str(tmp_path / "nowhere"), "--out", str(tmp_path / "judge")]
    assert form_judge.main(arguments) == 1
    assert capsys.readouterr().err.startswith("error: model.path")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
