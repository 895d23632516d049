"""Rows with images, from files to prompts with a place for each image's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError
from support.image_loading import (
    PART,
    SMALL,
    SMALL_TOKENS,
    SPEC,
    WIDE,
    WIDE_TOKENS,
    Loading,
    first,
    url,
)
from support.tiny_images import IMAGE_PAD, noise, plain, png
from support.tiny_models import write_tiny_llama

from rolemesh.engine.data.prompts import load_prompts
from rolemesh.engine.data.row_store import RowStore
from rolemesh.engine.data.rows import DataInvalidError, PromptRow, PromptTooLongError
from rolemesh.engine.data.trajectories import read_trajectories
from rolemesh.engine.images.prompt_images import images_of
from rolemesh.engine.model_folders.model_files import ModelFolderError
from rolemesh.engine.specs import CalculatorEnvironmentSpec, ModelFolderSpec
from rolemesh.services.preview.looking import Preview, PreviewSpec
from rolemesh.services.runtime.servicers.rollout import PromptSource


def test_a_path_becomes_an_image_with_its_places(load: Loading, tokenizer: Any) -> None:
    prompt = first(load([{"prompt": "Which bird?", "images": ["wide.png"], "answer": "heron"}]))
    text = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Which bird?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert prompt.text == text
    plain_tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    at = plain_tokens.index(IMAGE_PAD)
    expected = [*plain_tokens[:at], *[IMAGE_PAD] * WIDE_TOKENS, *plain_tokens[at + 1 :]]
    assert list(prompt.tokens) == expected
    (image,) = prompt.images
    assert image.data == WIDE
    assert image.grid == (1, 6, 8)
    assert prompt.metadata == "{}"


def test_the_expansion_is_that_of_transformers(load: Loading, tokenizer: Any, model: Path) -> None:
    """Qwen2_5_VLProcessor wants torchvision for videos; its expansion of images does not."""
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    rows = [{"prompt": "<image> or <image>?", "images": ["wide.png", "deep/small.png"]}]
    prompt = first(load(rows))
    theirs = Qwen2_5_VLProcessor.__new__(Qwen2_5_VLProcessor)
    theirs.image_processor = Qwen2VLImageProcessorPil.from_pretrained(
        model, trust_remote_code=False
    )
    theirs.tokenizer = tokenizer
    theirs.image_token = "<|image_pad|>"
    made = theirs.image_processor(
        images=[noise(width=112, height=84), plain((255, 0, 0))], return_tensors="np"
    )
    text = prompt.text
    for number in range(len(prompt.images)):
        more = theirs.replace_image_token(made, number)
        text = text.replace("<|image_pad|>", more.replace("<|image_pad|>", "\0"), 1)
    text = text.replace("\0", "<|image_pad|>")
    assert list(prompt.tokens) == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [image.grid for image in prompt.images] == list(map(tuple, made["image_grid_thw"]))


@pytest.mark.parametrize(
    "images",
    [
        ["deep/small.png"],
        "deep/small.png",
        ["deep/../deep/small.png"],
        [url(SMALL)],
        {"bytes": None, "path": "deep/small.png"},
    ],
)
def test_forms_of_one_image_in_json(load: Loading, images: Any) -> None:
    prompt = first(load([{"prompt": "?", "images": images}]))
    assert [image.data for image in prompt.images] == [SMALL]
    assert prompt.tokens.count(IMAGE_PAD) == SMALL_TOKENS


@pytest.mark.parametrize("form", ["bytes", "list of bytes", "struct", "list of structs"])
def test_forms_of_one_image_in_parquet(
    load: Loading, tmp_path: Path, tokenizer: Any, form: str
) -> None:
    value: Any = SMALL if "bytes" in form else {"bytes": SMALL, "path": "small.png"}
    values = [[value], [value]] if "list" in form else [value, value]
    table = pyarrow.table({"prompt": ["a", "b"], "images": values, "level": [1, 1]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    spec = SPEC.validate_python(
        {"type": "parquet", "path": str(tmp_path / "rows.parquet"), "images": {}}
    )
    prompts = load_prompts(spec, tokenizer=tokenizer, seed=0, model=load.model)
    for prompt in prompts.slice("train", 0, 2):
        assert [image.data for image in prompt.images] == [SMALL]
        assert prompt.metadata == '{"level": 1}'


def test_parts_markers_and_plain_text_say_where_images_stand(load: Loading) -> None:
    parts = [{"type": "text", "text": "a"}, PART, {"type": "text", "text": "b", "image": None}]
    system = [{"type": "text", "text": "Say "}, {"type": "text", "text": "one word."}]
    rows: list[dict[str, Any]] = [
        {"prompt": [{"role": "user", "content": parts}]},
        {"prompt": "a<image>b"},
        {"prompt": "ab"},
        {"prompt": [{"role": "system", "content": system}, {"role": "user", "content": "ab"}]},
    ]
    prompts = load([{**row, "images": ["deep/small.png"]} for row in rows])
    found = {prompt.prompt_id: prompt.text for prompt in prompts.slice("train", 0, 4)}
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    end = "<|im_end|>\n<|im_start|>assistant\n"
    assert found == {
        0: f"<|im_start|>user\na{image}b{end}",
        1: f"<|im_start|>user\na{image}b{end}",
        2: f"<|im_start|>user\n{image}ab{end}",
        3: f"<|im_start|>system\nSay one word.<|im_end|>\n<|im_start|>user\n{image}ab{end}",
    }


def test_several_images_keep_their_order(load: Loading) -> None:
    prompt = first(load([{"prompt": "<image>or<image>", "images": ["wide.png", url(SMALL)]}]))
    runs = [len(run) for run in _runs(prompt.tokens)]
    assert runs == [WIDE_TOKENS, SMALL_TOKENS]
    assert [image.data for image in prompt.images] == [WIDE, SMALL]


def _runs(tokens: Sequence[int]) -> list[str]:
    return "".join("x" if token == IMAGE_PAD else " " for token in tokens).split()


@pytest.mark.parametrize("images", [[], None])
def test_a_row_without_images_is_text(load: Loading, images: Any) -> None:
    prompt = first(load([{"prompt": "a <image> tag", "images": images}]))
    assert prompt.text == "<|im_start|>user\na <image> tag<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.images == ()


def test_without_the_section_a_column_images_is_metadata(load: Loading) -> None:
    prompts = load([{"prompt": "<image>", "images": ["wide.png"]}], images=None, model=None)
    assert not prompts.has_images
    assert first(prompts).metadata == '{"images": ["wide.png"]}'
    assert "data.image_processor" not in prompts.facts()


def test_the_section_asks_for_the_column(load: Loading) -> None:
    with pytest.raises(DataInvalidError, match=r"no column 'images', which data\.columns\.images"):
        load([{"prompt": "?", "image": ["wide.png"]}])
    prompts = load([{"prompt": "?", "image": "wide.png"}], columns={"images": "image"})
    assert len(first(prompts).images) == 1
    with pytest.raises(ValidationError, match=r"columns\.images is 'image', but images is"):
        load([{"prompt": "?"}], images=None, columns={"images": "image"})


def test_the_same_text_with_other_images_is_another_prompt(load: Loading) -> None:
    rows = [{"prompt": "?", "images": [name]} for name in ("wide.png", "deep/small.png")]
    prompts = load([*rows, rows[0]], held_out_size=1)
    held_out = prompts.every("held_out")[0].images
    left = [row.images for row in prompts.every("train")]
    assert held_out not in left
    # Two rows of the first picture count as one prompt.
    assert len(left) == (1 if held_out == ("wide.png",) else 2)


def test_lengths_count_the_places(load: Loading) -> None:
    row = {"prompt": "?", "images": ["wide.png"]}
    length = len(first(load([row])).tokens)
    text_length = length - WIDE_TOKENS + 1
    assert load([row], max_prompt_tokens=length).num_filtered["train"] == 0
    other = {"prompt": "?", "images": []}
    left = load([row, other], max_prompt_tokens=length - 1)
    assert left.num_filtered["train"] == 1
    assert left.every("train")[0].images == ()
    assert text_length <= length - 1, "the text alone would have been let in"
    with pytest.raises(PromptTooLongError, match=f"the longest {length}: "):
        load([row], max_model_len=length)
    load([row], max_model_len=length + 1)
    given = {**row, "completion": "yes"}
    assert load([given, other], max_row_tokens=length + 4).num_filtered["train"] == 0
    assert load([given, other], max_row_tokens=length + 3).num_filtered["train"] == 1


def test_a_model_without_images_is_refused(load: Loading, tmp_path: Path) -> None:
    text_model = write_tiny_llama(tmp_path / "text")
    with pytest.raises(ModelFolderError, match="is a llama model, and images are served for"):
        load([{"prompt": "?", "images": ["wide.png"]}], model=text_model)
    with pytest.raises(DataInvalidError, match="there is no model folder"):
        load([{"prompt": "?", "images": ["wide.png"]}], model=None)


def test_the_processor_is_a_fact_of_the_run(load: Loading) -> None:
    prompts = load([{"prompt": "?", "images": []}])
    renderer = prompts.renderer
    assert renderer.images is not None
    assert prompts.facts()["data.image_processor"] == renderer.images.processor.fingerprint


def test_rows_come_back_from_a_file_as_they_were(tmp_path: Path) -> None:
    turns = ({"role": "user", "content": [PART, {"type": "text", "text": "é"}]},)
    rows = [
        PromptRow(messages=turns, images=("a.png", url(SMALL)), image_folder="/f", where="one"),
        PromptRow(messages=({"role": "user", "content": "x"},), where="two"),
    ]
    with (tmp_path / "rows").open("w+b") as file:
        store = RowStore(file)
        store.add(rows, None, with_identities=True)
        again = RowStore.opened(file, store.facts())
        for number, row in enumerate(rows):
            found = again[number]
            assert [dict(turn) for turn in found.messages] == [dict(turn) for turn in row.messages]
            assert (tuple(found.images), found.image_folder) == (
                tuple(row.images),
                row.image_folder,
            )
            assert found.identity == row.identity
    # A row of text lies there as it did before there were images.
    assert (tmp_path / "rows").read_bytes().endswith(b',null,"two"]')


def test_large_tables_are_kept_and_found_again(
    load: Loading, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pictures = [png(noise(width=640, height=480, seed=seed)) for seed in range(10)]
    table = pyarrow.table({"prompt": ["?"] * 10, "images": [[one] for one in pictures]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", compression="none")
    spec = SPEC.validate_python(
        {"type": "parquet", "path": str(tmp_path / "rows.parquet"), "images": {}}
    )
    for _ in range(2):
        prompts = load_prompts(
            spec, tokenizer=tokenizer, seed=0, model=load.model, max_model_len=500
        )
        found = sorted(prompt.images[0].sha256 for prompt in prompts.slice("train", 0, 10))
        assert len(set(found)) == 10
        assert prompts.every("train").tokens("prompt").min() > 0
    assert len(list((tmp_path / "cache" / "rolemesh" / "rows").glob("*.rows"))) == 1


def test_given_answers_have_the_column_of_images(load: Loading) -> None:
    rows = [
        {"prompt": "a", "images": ["wide.png"], "chosen": "x", "rejected": "y"},
        {"prompt": "b", "images": [], "chosen": "x", "rejected": "y"},
    ]
    prompts = load(rows)
    batch = read_trajectories(prompts, "train", 0, 2, "preference")
    by_prompt = dict(
        zip(batch["prompt_ids"].values.tolist(), batch["images"].strings(), strict=True)
    )
    (image,) = images_of(by_prompt[0])
    assert (image.data, image.grid) == (WIDE, (1, 6, 8))
    assert images_of(by_prompt[1]) == ()
    places = [
        sum(row == IMAGE_PAD for row in tokens.tolist())
        for tokens in np.split(batch["tokens"].values.numpy(), batch["tokens"].offsets[1:-1])
    ]
    ids = batch["prompt_ids"].values.tolist()
    assert places == [WIDE_TOKENS if number == 0 else 0 for number in ids]


def test_given_answers_without_images_lack_the_column(load: Loading) -> None:
    prompts = load([{"prompt": "a", "completion": "b"}], images=None, model=None)
    batch = read_trajectories(prompts, "train", 0, 1, "demonstration")
    assert "images" not in batch


def test_a_given_answer_may_not_hold_a_place(load: Loading) -> None:
    prompts = load([{"prompt": "a", "images": [], "completion": "<|image_pad|>"}])
    with pytest.raises(DataInvalidError, match=r"line 1: its completion holds the token in whose"):
        read_trajectories(prompts, "train", 0, 1, "demonstration")


def test_a_prompt_without_its_images_for_checks_of_samplers(load: Loading) -> None:
    prompts = load([{"prompt": "a", "images": ["wide.png"]}])
    tokens = first(prompts).tokens
    left = prompts.without_images(tokens)
    assert IMAGE_PAD not in left
    assert len(left) == len(tokens) - WIDE_TOKENS


def test_a_role_refuses_images_with_an_environment(load: Loading, model: Path) -> None:
    load([{"prompt": "a", "images": ["wide.png"]}])
    data = SPEC.validate_python(
        {
            "type": "jsonl",
            "path": str(load.place / "rows.jsonl"),
            "images": {"folder": str(load.folder)},
        }
    )
    source = PromptSource(ModelFolderSpec(path=model), data, 0, max_model_len=200)
    assert source.prompts.has_images
    assert IMAGE_PAD not in source.probe_tokens()
    nothing: Any = None
    source.play(None, 200, nothing, nothing)
    with pytest.raises(DataInvalidError, match="environment of type 'calculator', and turns with"):
        source.play(CalculatorEnvironmentSpec(), 200, nothing, nothing)


def test_a_check_of_a_recipe_counts_the_places(load: Loading, model: Path) -> None:
    length = len(first(load([{"prompt": "a", "images": ["wide.png"]}])).tokens)
    spec = PreviewSpec.model_validate(
        {
            "model": model,
            "data": {
                "type": "jsonl",
                "path": str(load.place / "rows.jsonl"),
                "images": {"folder": str(load.folder)},
                "max_prompt_tokens": length,
            },
            "seed": 0,
            "given": "prompt",
            "max_model_len": length + 7,
            "max_new_tokens": 8,
        }
    )
    preview = Preview(spec)
    assert preview.counts()["train"] == 1
    lengths = preview.lengths()
    assert lengths is not None
    assert (lengths["less_room"], lengths["longest"]) == (1, length)
    prompt, _ = preview.first()
    assert prompt is not None
    assert len(prompt.images) == 1
