"""A classifier of images and text as a reward: against transformers' whole model; refusals."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.image_rows import pictures
from support.rank_processes import RankContext, RankPool
from support.tiny_images import IMAGE_PAD, write_tiny_image_model
from support.tiny_models import write_tiny_classifier
from support.updates import forward_backward
from torch.nn.functional import logsigmoid
from transformers import AutoModelForImageTextToText, AutoTokenizer

from rolemesh.engine.experience import Experience
from rolemesh.engine.images.processing import ImageProcessor
from rolemesh.engine.images.prompt_images import ImageInvalidError, PromptImage, images_text
from rolemesh.engine.layout.family_records import TEXT_PARTS
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.model_folders.model_files import ModelFolderError
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rewards.sources import ClassifierReward
from rolemesh.engine.specs import (
    BradleyTerryLossSpec,
    ClassifierRewardSpec,
    ModelSpec,
    OptimizerSpec,
)
from rolemesh.engine.train.trainer import Trainer

TOLERANCE = 1e-5
"""Of scores of about 1 in float32: sums in another order."""
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=TEXT_PARTS)
def base(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    return write_tiny_image_model(directory, family=request.param, seed=5)


@pytest.fixture(scope="module")
def folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with a head that is not zero, as the trainer writes it."""
    trainer = Trainer.reward(source_of(base, new_head=True), OptimizerSpec())
    head = trainer.model.head.weight
    with torch.no_grad():
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(2)) * 0.1)
    exported = tmp_path_factory.mktemp("export") / "reward"
    trainer.export(exported, dtype="float32")
    return exported


def source_of(folder: Path, **fields: Any) -> ClassifierRewardSpec:
    return ClassifierRewardSpec(model=ModelSpec(path=folder, compute_dtype="float32"), **fields)


@pytest.fixture(scope="module")
def shown(base: Path) -> list[list[PromptImage]]:
    """Of two prompts that differ in their images alone, of one with two, of one without."""
    red, blue, noisy = pictures(base).values()
    return [[red], [blue], [noisy, red], []]


PROMPTS = (f"{IMAGE}What is it?", f"{IMAGE}What is it?", f"{IMAGE} or {IMAGE}?", "Hi")
COMPLETIONS = ("red", "red", "<|image_pad|>!", "<|image_pad|>, you say")
"""The last ones say a placeholder's name, which is no place of an image."""


def batch_of(shown: list[list[PromptImage]]) -> Experience:
    return Experience.of_rows(
        {
            "prompt_text": list(PROMPTS),
            "completion_text": list(COMPLETIONS),
            "images": [images_text(row) for row in shown],
        }
    )


def reward_of(folder: Path, **fields: Any) -> ClassifierReward:
    return ClassifierReward(source_of(folder, **fields), CPU, RankMesh.single())


def scores_of(reward: ClassifierReward, batch: Experience) -> list[float]:
    found: list[float] = reward.score(batch, lambda *_: None).tolist()
    return found


def by_transformers(base: Path, head_LD: torch.Tensor, shown: list[list[PromptImage]]) -> Any:
    """Scores by hand: transformers' tower and text model, and the head at each text's last token.

    Only the prompt's placeholders are places of images.
    """
    whole = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).eval()
    model, processor = whole.model, ImageProcessor(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    found = []
    for prompt, completion, images in zip(PROMPTS, COMPLETIONS, shown, strict=True):
        # A template has one placeholder an image; the model wants one for each of its places.
        first, *parts = prompt.split("<|image_pad|>")
        text = first
        for image, part in zip(images, parts, strict=True):
            text += "<|image_pad|>" * (image.grid[1] * image.grid[2] // 4) + part
        asked = tokenizer(text)["input_ids"]
        row_T = torch.tensor(asked + tokenizer(completion)["input_ids"])
        is_image_T = (row_T == IMAGE_PAD) & (torch.arange(len(row_T)) < len(asked))
        grids = torch.tensor([image.grid for image in images]) if images else None
        deep = {}
        with torch.no_grad():
            embedded_TD = model.get_input_embeddings()(row_T)
            if images:
                made = [
                    processor.patches(np.asarray(Image.open(io.BytesIO(one.data))))[0]
                    for one in images
                ]
                patches = torch.from_numpy(np.concatenate(made))
                seen = model.visual(patches, grid_thw=grids)
                embedded_TD[is_image_T] = seen.pooler_output
                if "deepstack_features" in seen:
                    deep = {
                        "visual_pos_masks": is_image_T[None],
                        "deepstack_visual_embeds": seen.deepstack_features,
                    }
            positions, _ = model.get_rope_index(
                row_T[None], is_image_T.int()[None], image_grid_thw=grids
            )
            hidden = model.language_model(
                inputs_embeds=embedded_TD[None], position_ids=positions, **deep
            ).last_hidden_state[0, -1]
        found.append(float(hidden @ head_LD[0]))
    return found


def test_scores_are_those_of_transformers(
    base: Path, folder: Path, shown: list[list[PromptImage]]
) -> None:
    found = scores_of(reward_of(folder), batch_of(shown))
    head = load_file(folder / "model.safetensors")["score.weight"]
    assert found == pytest.approx(by_transformers(base, head, shown), abs=TOLERANCE)
    # A picture that did not reach the model would not show above: the first two share their text.
    assert abs(found[0] - found[1]) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("base", "layout"),
    # Both families train over ranks in both ways: test_images.
    [("qwen2_5_vl", {"tp": 2}), ("qwen3_vl", {"pp": 2})],
    indirect=["base"],
)
def test_scores_of_ranks_are_those_of_one(
    layout: dict[str, int],
    folder: Path,
    shown: list[list[PromptImage]],
    rank_pool: RankPool,
) -> None:
    alone = scores_of(reward_of(folder), batch_of(shown))
    ranks = rank_pool.run(score_of_rank, 2, layout, folder, batch_of(shown))
    # Stages before the last one return nothing.
    for scores in ranks[-1:] if "pp" in layout else ranks:
        assert scores == pytest.approx(alone, abs=TOLERANCE)


def score_of_rank(
    at: RankContext, layout: dict[str, int], folder: Path, batch: Experience
) -> list[float]:
    with at.connect(HybridLayout(TrainLayout(**layout))) as mesh:
        return scores_of(ClassifierReward(source_of(folder), CPU, mesh), batch)


def test_without_the_column_scores_are_those_of_text(
    folder: Path, shown: list[list[PromptImage]]
) -> None:
    reward = reward_of(folder)
    batch = batch_of([[], [], [], []])
    texts = batch.require(("prompt_text", "completion_text"))
    assert scores_of(reward, batch) == scores_of(reward, texts)
    assert scores_of(reward, texts) != scores_of(reward, batch_of(shown))


def test_rows_are_trained_on_as_they_are_scored(
    folder: Path, shown: list[list[PromptImage]]
) -> None:
    reward = reward_of(folder)
    trajectories = batch_of(shown) | Experience.of_rows(
        {"pair_ids": [0, 0, 1, 1], "preference": [1.0, -1.0, 1.0, -1.0]}
    )
    rows = reward.as_scored(trajectories)
    trainer = Trainer.reward(source_of(folder), OptimizerSpec())
    metrics = forward_backward(trainer, rows, BradleyTerryLossSpec(), rows_per_unit=2)
    first, second, third, fourth = scores_of(reward, trajectories)
    margins = torch.tensor([first - second, third - fourth])
    assert metrics["loss"] == pytest.approx(float(-logsigmoid(margins).mean()), abs=TOLERANCE)


def test_a_classifier_of_text_refuses_rows_with_images(
    tmp_path: Path, shown: list[list[PromptImage]]
) -> None:
    reward = reward_of(write_tiny_classifier(tmp_path / "text", seed=4))
    batch = batch_of(shown)
    wanted = r"row 0 has images, but the classifier in .*text' takes none .*give source\.model"
    for judge in (lambda: scores_of(reward, batch), lambda: reward.faults(batch)):
        with pytest.raises(ImageInvalidError, match=wanted):
            judge()
    # Rows without images are judged, whatever columns there are.
    assert len(scores_of(reward, batch_of([[], [], [], []]))) == 4


def test_a_prompt_without_a_place_for_its_image_is_refused(
    folder: Path, shown: list[list[PromptImage]]
) -> None:
    batch = batch_of([[*shown[0], *shown[1]], *shown[1:]])
    with pytest.raises(ImageInvalidError, match=r"row 0: .*makes 1 places for 2 images"):
        scores_of(reward_of(folder), batch)


def test_a_row_that_is_too_long_with_its_images_says_so(
    folder: Path, shown: list[list[PromptImage]]
) -> None:
    reward = reward_of(folder)
    reward._classifier.max_tokens = 26
    # Its text alone has 13 tokens; an image takes 12 or 4 places instead of one.
    assert list(reward.faults(batch_of(shown))) == [2]
    with pytest.raises(ValueError, match="row 2 has 27 tokens, but the classifier sees at most 26"):
        scores_of(reward, batch_of(shown))


def test_a_new_head_is_not_put_on_a_folder_that_has_one(folder: Path) -> None:
    with pytest.raises(ModelFolderError, match="has a head"):
        Trainer.reward(source_of(folder, new_head=True), OptimizerSpec())
