"""Tests of models of images and text: against transformers, over ranks, and in the sampler."""

from __future__ import annotations

import io
import json
import math
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from support.fitted_work import work_of
from support.image_rows import pictures, shown, with_images
from support.parallel_training import Job, assert_agree, joined, near_policy, train
from support.rank_processes import RankContext, RankPool
from support.tiny_families import write_tiny_decoder
from support.tiny_images import IMAGE_PAD, noise, write_tiny_image_model
from support.token_batches import token_batch, with_shared_prompts
from support.updates import update_whole
from transformers import AutoModelForImageTextToText

from rolemesh.engine.experience import Experience
from rolemesh.engine.fit.rank_memory import estimated
from rolemesh.engine.images.positions import mrope_positions
from rolemesh.engine.images.processing import PROCESSOR_FILE, ImageProcessor
from rolemesh.engine.images.prompt_images import (
    ImageInvalidError,
    PromptImage,
    images_of,
    images_text,
)
from rolemesh.engine.layout.families import DecoderShape, parameter_shape, stage_tensors
from rolemesh.engine.layout.family_records import TEXT_PARTS
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.model_folders.model_files import ModelFolderError, read_config_file
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.images.image_tower import tower_of
from rolemesh.engine.models.images.whole_models import tower_tensors
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring import compute_logprobs
from rolemesh.engine.rollout.hf.sampler import HfBackend
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.specs import (
    AdapterSpec,
    HfSpec,
    ModelSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    PpoValueLossSpec,
    SamplingSpec,
)
from rolemesh.engine.train.trainer import Trainer

TOLERANCE = 3e-6
"""Of log-probs in float32: sums in another order."""


@pytest.fixture(scope="module", params=TEXT_PARTS)
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return write_tiny_image_model(tmp_path_factory.mktemp(request.param), family=request.param)


@pytest.fixture(scope="module")
def batch(folder: Path) -> Experience:
    """Eight rows: pairs of one prompt, of which some differ in their images alone."""
    prompts = (3, 3, 5, 5, 2, 2, 4, 4)
    rows = with_shared_prompts(token_batch(prompt_lengths=prompts, vocab_size=250), 2)
    red, blue, noisy = pictures(folder).values()
    images = ([red], [red], [red], [blue], [noisy, red], [noisy, blue], [], [])
    return with_images(rows, folder, images)


def model_of(folder: Path, **fields: Any) -> RankModel:
    spec = ModelSpec.model_validate({"path": folder, "compute_dtype": "float32", **fields})
    return RankModel(CausalLm(spec))


def by_transformers(
    folder: Path, batch: Experience, adapted: Callable[[Any], Any] = lambda whole: whole
) -> list[torch.Tensor]:
    """Log-probs of completion tokens by transformers' whole model, a row at a time."""
    loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    whole = adapted(loaded).eval()
    processor = ImageProcessor(folder)
    found = []
    rows = zip(
        batch["tokens"].rows(),
        batch["prompt_lengths"].values,
        batch["images"].strings(),
        strict=True,
    )
    for row_T, prompt, text in rows:
        inputs: dict[str, Any] = {}
        if images := images_of(text):
            made = [
                processor.patches(np.asarray(Image.open(io.BytesIO(one.data)))) for one in images
            ]
            inputs["pixel_values"] = torch.from_numpy(np.concatenate([one for one, _ in made]))
            inputs["image_grid_thw"] = torch.tensor([grid for _, grid in made])
            inputs["mm_token_type_ids"] = (row_T == IMAGE_PAD).int()[None]
        with torch.no_grad():
            logits = whole(input_ids=row_T[None], **inputs).logits[0]
        scores = logits.log_softmax(-1)[prompt - 1 : -1]
        found.append(scores.gather(-1, row_T[prompt:, None]).squeeze(-1))
    return found


def test_positions_are_those_of_transformers(folder: Path) -> None:
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    row = torch.tensor([1, 2, *[IMAGE_PAD] * 12, 3, *[IMAGE_PAD] * 6, 5, 6])
    grids = [(1, 6, 8), (1, 4, 6)]
    expected, _ = whole.model.get_rope_index(
        row[None], (row == IMAGE_PAD).int()[None], image_grid_thw=torch.tensor(grids)
    )
    assert torch.equal(mrope_positions(len(row), [2, 15], grids, 2), expected[:, 0])


@pytest.mark.parametrize("shares", ["auto", "never"])
def test_log_probs_are_those_of_transformers(folder: Path, batch: Experience, shares: str) -> None:
    """Also where rows share a prompt, and where equal placeholders are of different images."""
    model = model_of(folder, share_prefixes=shares)
    found = compute_logprobs(model, batch, temperature=1.0)["logprobs"]
    for row, expected in zip(found.rows(), by_transformers(folder, batch), strict=True):
        torch.testing.assert_close(row, expected, rtol=0, atol=TOLERANCE)
    # They are different: a picture that did not reach the model would not show above.
    rows = list(found.rows())
    assert not torch.equal(rows[2][:1], rows[3][:1])


def test_rows_without_images_are_those_of_the_text_alone(folder: Path, batch: Experience) -> None:
    """To the bit, and the tower is not asked."""
    text = batch.select(torch.tensor([6, 7]))
    bare = Experience({name: one for name, one in text.columns.items() if name != "images"})
    asked = tower_of(folder, torch.device("cpu")).num_passes
    first, second = (
        compute_logprobs(model_of(folder), rows, temperature=1.0)["logprobs"].values
        for rows in (text, bare)
    )
    assert torch.equal(first, second)
    assert tower_of(folder, torch.device("cpu")).num_passes == asked


LAYOUTS = {
    "tp2": TrainLayout(tp=2),
    "pp2": TrainLayout(pp=2),
    "fsdp2": TrainLayout(dp=2, fsdp=2),
    "cp2": TrainLayout(dp=2, cp=2),
    "tp2-pp2-fsdp2": TrainLayout(tp=2, pp=2, dp=2, fsdp=2),
}
SETTINGS = {"tp2-pp2-fsdp2": {"sequence_parallel": True, "recompute": "full"}}
"""Of a layout's ranks alone: slices hold shares of the tokens, and layers run again."""


QUICK = [
    *(("qwen2_5_vl", "tp2-pp2-fsdp2", "policy"), ("qwen3_vl", "tp2-pp2-fsdp2", "critic")),
    *(("qwen2_5_vl", "cp2", "critic"), ("qwen3_vl", "cp2", "policy")),
]
"""What `make test` trains: each family and each kind in all ways at once, and in rows that are
cut."""


@pytest.mark.parametrize(
    ("folder", "name", "kind"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in product(TEXT_PARTS, LAYOUTS, ("policy", "critic"))
    ],
    indirect=["folder"],
)
def test_three_steps_of_a_layout_are_those_of_one_rank(
    folder: Path, batch: Experience, rank_pool: RankPool, name: str, kind: Any
) -> None:
    if kind == "policy":
        scored = compute_logprobs(model_of(folder), batch, temperature=1.0)["logprobs"]
        job = Job(folder, near_policy(batch, scored), PpoPolicyLossSpec())
    else:
        job = Job(folder, batch, PpoValueLossSpec(), kind="critic")
    job = replace(job, model={"micro_batch_tokens": 48})
    layout = LAYOUTS[name]
    (alone,) = rank_pool.run(train, 1, job)
    settings = {**job.model, **SETTINGS.get(name, {})}
    spread = replace(job, layout=layout, model=settings)
    parts = rank_pool.run(train, layout.world_size, spread)
    assert_agree(joined(parts, layout), joined([alone], TrainLayout()))


def test_the_tower_looks_once_at_an_image(folder: Path, batch: Experience) -> None:
    tower = tower_of(folder, torch.device("cpu"))
    model = model_of(folder)
    compute_logprobs(model, batch, temperature=1.0)
    before = tower.num_passes
    compute_logprobs(model, batch, temperature=1.0)
    assert tower.num_passes == before


def test_the_sampler_gives_tokens_what_the_trainer_gives_them(folder: Path) -> None:
    """Of prompts with one image, two and none in one wave, each sampled twice."""
    red, blue, noisy = pictures(folder).values()
    images = [[red], [blue], [noisy, red], []]
    prompts = with_images(
        token_batch(prompt_lengths=(3, 3, 5, 4), completion_lengths=(1, 1, 1, 1), vocab_size=250),
        folder,
        images,
    )
    model = model_of(folder)
    backend = HfBackend(HfSpec(max_model_len=256, max_num_seqs=6, dtype="float32"), folder)
    backend.update_weights(model.model.named_weights(), 0)
    lengths = prompts["prompt_lengths"].values.tolist()
    requests = [
        RolloutRequest(
            row=2 * number + sample,
            prompt_tokens=row[:length].tolist(),
            seed=2 * number + sample,
            images=images[number],
        )
        for number, (row, length) in enumerate(zip(prompts["tokens"].rows(), lengths, strict=True))
        for sample in range(2)
    ]
    sampling = SamplingSpec(temperature=1.0, max_new_tokens=9)
    found = sorted(backend.generate(requests, sampling), key=lambda one: one.row)
    rows = Experience.of_rows(
        {
            "tokens": [
                [*one.prompt_tokens, *made.completion_tokens]
                for one, made in zip(requests, found, strict=True)
            ],
            "prompt_lengths": [len(one.prompt_tokens) for one in requests],
            "images": [images_text(one.images) for one in requests],
        }
    )
    scored = compute_logprobs(model, rows, temperature=1.0)["logprobs"]
    for row, made in zip(scored.rows(), found, strict=True):
        torch.testing.assert_close(row, torch.tensor(made.logprobs), rtol=0, atol=TOLERANCE)


# --- what does not fit -----------------------------------------------------------------------


def test_a_row_whose_places_are_not_those_of_its_images_is_refused(
    folder: Path, batch: Experience
) -> None:
    red, _, noisy = pictures(folder).values()
    wrong = batch | Experience.of_rows(
        {"images": [images_text([noisy])] + [images_text([red])] * (len(batch) - 1)}
    )
    with pytest.raises(
        ImageInvalidError, match="row 0 has 4 places for its 1 images, which take 12"
    ):
        compute_logprobs(model_of(folder), wrong, temperature=1.0)


UNSEEN = "row 0 shows images, but the rows have no column 'images'"


def test_rows_that_lost_their_images_are_not_scored(folder: Path, batch: Experience) -> None:
    """Their places would be words to the model, and nothing would say so."""
    lost = batch.require(name for name in batch.columns if name != "images")
    model = model_of(folder)
    with pytest.raises(ImageInvalidError, match=UNSEEN):
        compute_logprobs(model, lost, temperature=1.0)


def test_rows_that_lost_their_images_are_not_trained(folder: Path, batch: Experience) -> None:
    lost = batch.require(name for name in batch.columns if name != "images")
    spec = ModelSpec(path=folder, compute_dtype="float32")
    critic = Trainer.critic(spec, OptimizerSpec())
    loss = PpoValueLossSpec()
    with pytest.raises(ImageInvalidError, match=UNSEEN):
        update_whole(critic, lost, loss, epochs=1, mini_batch_rows=8, seed=0)


def test_images_for_a_model_of_text_are_refused(tmp_path: Path, batch: Experience) -> None:
    text = write_tiny_decoder(tmp_path, "qwen2", vocab_size=512, max_position_embeddings=256)
    with pytest.raises(ImageInvalidError, match="this model takes none"):
        compute_logprobs(model_of(text), batch, temperature=1.0)


def test_an_image_of_another_processor_is_refused(folder: Path, batch: Experience) -> None:
    """Its grid says so before anything is computed of it."""
    image = shown(folder, noise(seed=8))
    other = PromptImage.of(image.data, (1, 8, 6))
    rows = with_images(
        token_batch(prompt_lengths=(3,), completion_lengths=(2,), vocab_size=250), folder, [[other]]
    )
    with pytest.raises(ImageInvalidError, match=r"said to have the grid \[1, 8, 6\]"):
        compute_logprobs(model_of(folder), rows, temperature=1.0)


def test_a_processor_of_other_patches_is_refused(folder: Path, tmp_path: Path) -> None:
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    said = json.loads((wrong / PROCESSOR_FILE).read_text())
    (wrong / PROCESSOR_FILE).write_text(json.dumps({**said, "patch_size": 12}))
    with pytest.raises(ModelFolderError, match="has the patch_size 12, but the vision_config"):
        tower_of(wrong, torch.device("cpu"))


def test_an_image_that_another_processor_cut_is_refused_though_its_grid_is_right(
    folder: Path,
) -> None:
    """Other means and deviations make other patches of the same pixels."""
    image = shown(folder, noise(seed=8))
    other = PromptImage.of(image.data, image.grid, "0" * 64)
    (same,) = images_of(images_text([other]))
    with pytest.raises(ImageInvalidError, match=r"another processor \(000000000000\)"):
        tower_of(folder, torch.device("cpu")).features([same])


def test_bytes_that_changed_on_their_way_are_refused(folder: Path) -> None:
    text = images_text([shown(folder, noise(seed=9))])
    at = text.index('"data":"') + 40
    changed = text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :]
    assert images_of(text)
    with pytest.raises(ImageInvalidError, match="changed on their way"):
        images_of(changed)


# --- folders ---------------------------------------------------------------------------------


def test_an_export_loads_as_the_whole_model(
    folder: Path, batch: Experience, tmp_path: Path
) -> None:
    """Trained text, the tower as it was, and all that shows images to it."""
    trainer = Trainer.policy(
        ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec(learning_rate=1e-2)
    )
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    update_whole(
        trainer,
        near_policy(batch, scored),
        PpoPolicyLossSpec(),
        epochs=1,
        mini_batch_rows=8,
        seed=0,
    )
    trainer.export(tmp_path / "export", dtype="float32")
    found = compute_logprobs(trainer.rank_model, batch, temperature=1.0)["logprobs"]
    for row, expected in zip(
        found.rows(), by_transformers(tmp_path / "export", batch), strict=True
    ):
        torch.testing.assert_close(row, expected, rtol=0, atol=TOLERANCE)
    assert not torch.allclose(found.values, scored.values, rtol=0, atol=1e-3)
    # It is trained further from there, by any of its ways in.
    again = compute_logprobs(model_of(tmp_path / "export"), batch, temperature=1.0)["logprobs"]
    assert torch.equal(again.values, found.values)


def test_files_of_other_names_are_read(
    folder: Path, batch: Experience, tmp_path: Path, rank_pool: RankPool
) -> None:
    """With `model.language_model.` and `model.visual.`, or without; whole and by slices."""
    other = shutil.copytree(folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    changes = [("model.", "model.language_model."), ("visual.", "model.visual.")]
    if is_nested := "model.language_model.norm.weight" in tensors:
        changes = [(own, new) for new, own in changes]

    def renamed(name: str) -> str:
        for own, new in changes:
            if name.startswith(own):
                return name.replace(own, new, 1)
        return name

    changed = {renamed(name): tensor for name, tensor in tensors.items()}
    assert is_nested != ("model.visual.patch_embed.proj.weight" in changed)
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    found, expected = (
        compute_logprobs(model_of(one), batch, temperature=1.0)["logprobs"].values
        for one in (other, folder)
    )
    assert torch.equal(found, expected)
    for parts in rank_pool.run(score_in_slices, 2, [other, folder], batch):
        assert torch.equal(*parts)


def score_in_slices(at: RankContext, folders: list[Path], batch: Experience) -> list[torch.Tensor]:
    with at.connect(HybridLayout(TrainLayout(tp=2))) as mesh:
        specs = [ModelSpec(path=folder, compute_dtype="float32") for folder in folders]
        models = [RankModel(CausalLm(spec, mesh=mesh)) for spec in specs]
        scored = [compute_logprobs(model, batch, temperature=1.0) for model in models]
        return [one["logprobs"].values for one in scored]


def test_an_adapter_loads_in_peft_over_the_whole_model(
    folder: Path, batch: Experience, tmp_path: Path
) -> None:
    """On the text's matrices alone, though the tower has some of the same names."""
    adapter = AdapterSpec(rank=4)
    spec = ModelSpec(path=folder, compute_dtype="float32", adapter=adapter)
    trainer = Trainer.policy(spec, OptimizerSpec(learning_rate=3e-2))
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    update_whole(
        trainer,
        near_policy(batch, scored),
        PpoPolicyLossSpec(),
        epochs=1,
        mini_batch_rows=2,
        seed=0,
    )
    trainer.export(tmp_path / "adapter")
    found = compute_logprobs(trainer.rank_model, batch, temperature=1.0)["logprobs"]
    assert not torch.allclose(found.values, scored.values, rtol=0, atol=1e-3)

    def adapted(whole: Any) -> Any:
        with warnings.catch_warnings():
            # Of keys that are missing, or in vain.
            warnings.simplefilter("error")
            return PeftModel.from_pretrained(whole, tmp_path / "adapter")

    for row, expected in zip(found.rows(), by_transformers(folder, batch, adapted), strict=True):
        torch.testing.assert_close(row, expected, rtol=0, atol=TOLERANCE)
    again = model_of(folder, adapter=adapter.model_copy(update={"start": tmp_path / "adapter"}))
    values = compute_logprobs(again, batch, temperature=1.0)["logprobs"].values
    assert torch.equal(values, found.values)


def test_the_memory_of_a_first_stage_counts_the_tower(folder: Path) -> None:
    bytes_of = {}
    for stage in (0, 1):
        work = work_of(folder, layout=HybridLayout(TrainLayout(pp=2)), rank=stage, passes=1)
        found = estimated(work, "cpu")
        rest = whole_bytes(folder, stage)
        bytes_of[stage] = found.at_rest["weights"] - rest
    tower = sum(one.nbytes for _, one in tower_tensors(folder))
    assert bytes_of == {0: tower, 1: 0}


def whole_bytes(folder: Path, stage: int) -> int:
    """Of the text part of a stage."""
    shape = DecoderShape.from_config(read_config_file(folder))
    names = [name for _, name in stage_tensors(shape, pp=stage, size=2)]
    return sum(4 * math.prod(parameter_shape(shape, name)) for name in names)
