"""Models in folders that hold code as well: it is never run, nor a pickle opened."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.audit import recording
from support.hostile_folders import PICKLES, Planted, pickle_that_runs, plant
from support.tiny_models import write_tiny_classifier, write_tiny_llama

from rolemesh.engine.data.rendering.tokenizers import load_light_tokenizer
from rolemesh.engine.model_folders.model_files import ModelFolderError, check_model_files
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.classifier import Classifier
from rolemesh.engine.models.folder import read_config
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.model_folder import expected_weights, read_model_folder
from rolemesh.engine.specs import HfSpec, ModelSpec


def spec(folder: Path) -> ModelSpec:
    return ModelSpec(path=folder, compute_dtype="float32")


LOADERS: Mapping[str, Callable[[Path], Any]] = {
    "config": lambda folder: read_config(spec(folder)),
    "trainer": lambda folder: CausalLm(spec(folder)),
    "sampler": lambda folder: make_backend(HfSpec(max_model_len=64), folder),
    "weights of a sampler": lambda folder: expected_weights(read_model_folder(folder, 64)),
    "classifier": lambda folder: Classifier(spec(folder)),
    "tokenizer": load_light_tokenizer,
}


@pytest.fixture
def yes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whoever is asked whether code may be run says yes; gives the questions."""
    asked: list[str] = []

    def answer(question: object = "") -> str:
        asked.append(str(question))
        return "y"

    monkeypatch.setattr(builtins, "input", answer)
    return asked


def written(folder: Path, loader: str) -> Path:
    """A model of the kind that the loader takes."""
    if loader == "classifier":
        return write_tiny_classifier(folder, num_labels=1)
    return write_tiny_llama(folder)


def left_alone(planted: Planted, load: Callable[[], object]) -> None:
    """Loads, and finds that nothing planted was run or opened."""
    with recording("open") as events:
        load()
    assert not planted.mark.exists()
    assert planted.opened(events) == []


@pytest.mark.parametrize("loader", sorted(LOADERS))
def test_code_and_pickles_beside_a_known_model_are_left_alone(
    loader: str, tmp_path: Path, yes: list[str]
) -> None:
    planted = plant(written(tmp_path / "model", loader), tmp_path / "ran")
    left_alone(planted, lambda: LOADERS[loader](planted.folder))
    assert yes == []


@pytest.mark.parametrize("loader", sorted(LOADERS.keys() - {"tokenizer"}))
def test_a_model_that_only_its_own_code_could_make_is_refused(
    loader: str, tmp_path: Path, yes: list[str]
) -> None:
    folder = written(tmp_path / "model", loader)
    planted = plant(folder, tmp_path / "ran", model_type="evil")

    def load() -> None:
        with pytest.raises(ValueError, match=r"trust_remote_code|custom code"):
            LOADERS[loader](folder)

    left_alone(planted, load)
    assert yes == [], "the question would go to whatever the service has as its standard input"


@pytest.mark.parametrize("name", PICKLES)
def test_weights_that_are_pickles_are_refused(name: str, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle_that_runs(tmp_path / "ran"))
    with pytest.raises(ModelFolderError, match="other formats can run code and are not read"):
        check_model_files(folder)
    with pytest.raises(ModelFolderError, match="other formats can run code and are not read"):
        CausalLm(spec(folder))
    assert not (tmp_path / "ran").exists()


def test_the_planted_pickle_would_run(tmp_path: Path) -> None:
    """Otherwise the tests above would prove nothing."""
    import pickle  # noqa: TID251

    pickle.loads(pickle_that_runs(tmp_path / "ran"))  # noqa: S301
    assert (tmp_path / "ran").is_dir()
