"""Images in prompts of vLLM in the trainer's process: against transformers' whole model.

One engine serves most tests; they begin with an update of all weights.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.image_prompts import (
    LARGE_HEADS,
    differences,
    pictures_of_rows,
    request,
    scores,
    text_weights,
    whole_model,
)
from support.in_flight_checks import at_steps
from support.rollout_checks import perturb, set_stop_tokens, tokens_by_row, versions_of
from support.sampler_shards import rank_shard, shard_tensors
from support.tiny_images import IMAGE_PAD, noise, plain, write_tiny_image_model

from rolemesh.engine.images.processing import ImageProcessor
from rolemesh.engine.images.prompt_images import ImageInvalidError, PromptImage
from rolemesh.engine.layout.family_records import TEXT_PARTS
from rolemesh.engine.rollout.checksums import tensor_checksum
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import SamplingSpec, VllmSpec

LOGPROB = 3e-6
"""Largest difference of a log-prob near -6, float32: some of its 5e-7 steps. Measured 7e-7."""
FAR = 0.02
"""Mean difference where another image is scored, or another model. Measured 0.08 at least."""
MAX_MODEL_LEN = 192
BLOCK_TOKENS = 32
SAMPLING = SamplingSpec(max_new_tokens=12)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU vLLM rounds activations too"
)


@pytest.fixture(scope="module", params=TEXT_PARTS)
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("images") / "model"
    write_tiny_image_model(path, family=request.param, **LARGE_HEADS)
    set_stop_tokens(path, range(300, 330))
    return path


@pytest.fixture(scope="module")
def made(folder: Path) -> Iterator[VllmBackend]:
    backend = make_backend(spec(), folder)
    assert isinstance(backend, VllmBackend)
    yield backend
    backend.close()


@pytest.fixture
def model(folder: Path) -> Any:
    return whole_model(folder)


@pytest.fixture
def backend(made: VllmBackend, model: Any) -> VllmBackend:
    made.update_weights(text_weights(model), 3)
    return made


@pytest.fixture(scope="module")
def processor(folder: Path) -> ImageProcessor:
    return ImageProcessor(folder)


def spec(**fields: Any) -> VllmSpec:
    return VllmSpec.model_validate(
        {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 16, **fields}
    )


def test_rows_with_and_without_images_have_the_log_probs_of_the_whole_model(
    backend: VllmBackend, model: Any, processor: ImageProcessor
) -> None:
    pictures = pictures_of_rows()
    requests = [request(processor, row, shown) for row, shown in pictures.items()]
    assert len({len(one.images) for one in requests}) == 3
    found = list(backend.generate(requests, SAMPLING))
    assert {one.row for one in found} == set(pictures)
    assert float(differences(model, processor, requests, pictures, found).max()) < LOGPROB


def test_updates_of_the_text_alone_change_what_is_sampled_to_the_new_model(
    backend: VllmBackend, model: Any, processor: ImageProcessor
) -> None:
    pictures = pictures_of_rows()
    requests = [request(processor, row, shown) for row, shown in pictures.items()]
    for version in (4, 5):
        before = copy.deepcopy(model)
        perturb(model.model.language_model, version)
        perturb(model.lm_head, version)
        backend.update_weights(text_weights(model), version)
        found = list(backend.generate(requests, SAMPLING))
        assert versions_of(found) == {version}
        assert float(differences(model, processor, requests, pictures, found).max()) < LOGPROB
        assert float(differences(before, processor, requests, pictures, found).mean()) > FAR


def test_an_update_in_the_middle_of_a_generation_keeps_the_images(
    backend: VllmBackend, model: Any, processor: ImageProcessor
) -> None:
    pictures = pictures_of_rows()
    requests = [request(processor, row, shown) for row, shown in pictures.items()]
    newer = copy.deepcopy(model)
    perturb(newer.model.language_model, 9)
    backend.between_steps = at_steps({5: lambda: backend.update_weights(text_weights(newer), 4)})
    try:
        found = list(backend.generate(requests, SAMPLING))
    finally:
        backend.between_steps = None
    assert versions_of(found) == {3, 4}
    for one in found:
        asked, shown = requests[one.row], pictures[one.row]
        by_version = {
            3: scores(model, processor, asked, shown, one),
            4: scores(newer, processor, asked, shown, one),
        }
        expected = [by_version[version][at] for at, version in enumerate(one.policy_versions)]
        assert one.logprobs == pytest.approx(torch.stack(expected).tolist(), abs=LOGPROB)


def test_equal_tokens_of_unequal_images_share_nothing_and_of_equal_ones_all(
    backend: VllmBackend,
    model: Any,
    processor: ImageProcessor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # More tokens than two blocks of keys, the image in the first.
    text = "tell me what stands in this picture, and where. " * 2
    pictures = {0: [noise(seed=0)], 1: [noise(seed=1)], 2: [noise(seed=0)]}
    requests = [request(processor, row, shown, text) for row, shown in pictures.items()]
    tokens = requests[0].prompt_tokens
    requests = [replace(one, prompt_tokens=tokens) for one in requests]
    cached: list[int] = []
    step = backend._step

    def watched() -> list[Any]:
        outputs = step()
        cached.extend(one.num_cached_tokens for one in outputs)
        return outputs

    monkeypatch.setattr(backend, "_step", watched)
    later = iter([requests[1:2], requests[2:], None])

    class One:
        """The next when one has ended, so that its keys are there."""

        def take(self, *, is_idle: bool) -> Sequence[RolloutRequest] | None:
            return next(later) if is_idle else ()

    found = list(backend.generate(requests[:1], SAMPLING, One()))
    assert [one.row for one in found] == [0, 1, 2]
    assert cached[:2] == [0, 0]
    assert cached[2] == len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    assert float(differences(model, processor, requests, pictures, found).max()) < LOGPROB
    others = {0: pictures[1], 1: pictures[0], 2: pictures[1]}
    assert float(differences(model, processor, requests, others, found).mean()) > FAR

    # Together, equal ones share the prompt but for its last token.
    cached.clear()
    together = list(backend.generate(requests, SAMPLING))
    assert sorted(cached) == [0, 0, len(tokens) - 1]
    assert float(differences(model, processor, requests, pictures, together).max()) < LOGPROB


def test_a_tower_looks_at_each_image_once(backend: VllmBackend, processor: ImageProcessor) -> None:
    pixels = noise(seed=77)
    requests = [request(processor, row, [pixels]) for row in range(4)]
    before = list(backend.generate(requests, SAMPLING))
    tower = backend._prompts._tower
    assert tower is not None
    num_passes = tower.num_passes
    again = list(backend.generate(requests, SAMPLING))
    assert tower.num_passes == num_passes
    assert tokens_by_row(again) == tokens_by_row(before)
    list(backend.generate([request(processor, 0, [noise(seed=78)])], SAMPLING))
    assert tower.num_passes == num_passes + 1


@pytest.mark.parametrize("change", [-1, 1], ids=["too few", "too many"])
def test_a_prompt_whose_places_do_not_fit_its_images_is_refused(
    backend: VllmBackend, processor: ImageProcessor, change: int
) -> None:
    right = request(processor, 7, [noise(seed=0), plain((1, 2, 3))])
    at = list(right.prompt_tokens).index(IMAGE_PAD)
    places = 12 + 4
    assert list(right.prompt_tokens).count(IMAGE_PAD) == places
    tokens = list(right.prompt_tokens)
    if change < 0:
        del tokens[at]
    else:
        tokens.insert(at, IMAGE_PAD)
    with pytest.raises(
        ImageInvalidError,
        match=rf"prompt of row 7 has {places + change} places for its 2 images, which take 12, 4",
    ):
        backend.generate([replace(right, prompt_tokens=tokens)], SAMPLING)
    # Nothing is left behind.
    assert list(backend.generate([right], SAMPLING))


def test_an_image_of_another_grid_ends_the_generation_and_not_the_back_end(
    backend: VllmBackend, processor: ImageProcessor
) -> None:
    wide = request(processor, 0, [noise(width=112, height=84)])
    tall = PromptImage(wide.images[0].data, wide.images[0].sha256, (1, 8, 6))
    with pytest.raises(ImageInvalidError, match=r"grid \[1, 8, 6\]"):
        list(backend.generate([replace(wide, images=[tall])], SAMPLING))
    assert list(backend.generate([wide], SAMPLING))


def test_a_sampled_placeholder_in_a_later_prompt_is_a_token(
    backend: VllmBackend, model: Any, processor: ImageProcessor
) -> None:
    pictures = {0: [noise(seed=0)]}
    first = request(processor, 0, pictures[0])
    later = replace(first, prompt_tokens=[*first.prompt_tokens, IMAGE_PAD, 65, 66])
    found = list(backend.generate([later], SAMPLING))
    assert float(differences(model, processor, [later], pictures, found).max()) < LOGPROB


def test_the_engine_has_the_decoder_alone_and_torchvision_is_not_asked_for(
    backend: VllmBackend, model: Any
) -> None:
    held = backend.weight_checksums()
    assert held == {name: tensor_checksum(weight) for name, weight in text_weights(model)}
    assert "torchvision" not in sys.modules


def test_parts_of_a_rank_are_placed(
    backend: VllmBackend, folder: Path, model: Any, processor: ImageProcessor
) -> None:
    perturb(model.model.language_model, 21)
    weights = {name: weight.detach() for name, weight in text_weights(model)}
    backend.update_shard(shard_tensors(rank_shard(folder), weights), 8)
    pictures = pictures_of_rows()
    requests = [request(processor, row, shown) for row, shown in pictures.items()]
    found = list(backend.generate(requests, SAMPLING))
    assert versions_of(found) == {8}
    assert float(differences(model, processor, requests, pictures, found).max()) < LOGPROB


def test_a_probe_row_of_text_is_scored(backend: VllmBackend, model: Any) -> None:
    tokens = [5, 60, 7, 99, 200, 14]
    with torch.no_grad():
        logprobs_TV = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    expected = logprobs_TV.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    assert backend.score(tokens) == pytest.approx(expected, abs=LOGPROB)
