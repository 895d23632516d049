"""Tests of sampling: order of rows, and blocks that leave as soon as they are whole."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.scripted_sampler import (
    AsciiTokenizer,
    ScriptedBackend,
    number_prompts,
    tokens_of_seed,
)
from support.services import assert_same

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.experience import Experience
from rolemesh.engine.images.prompt_images import PromptImage, images_of
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.sampling import sample_experience
from rolemesh.engine.seeds import derive_seed
from rolemesh.engine.specs import SamplingSpec

RUN_SEED, STEP = 11, 4


def sample(
    backend: ScriptedBackend, num_prompts: int, samples: int, **options: Any
) -> tuple[Experience, list[tuple[int, Experience]]]:
    """The batch, and its blocks as they came."""
    blocks: list[tuple[int, Experience]] = []
    batch = sample_experience(
        backend,
        number_prompts().slice("train", 0, num_prompts),
        SamplingSpec(samples_per_prompt=samples, max_new_tokens=8),
        run_seed=RUN_SEED,
        step=STEP,
        progress=lambda *_: None,
        on_block=lambda index, rows: blocks.append((index, rows)),
        **{"tokenizer": AsciiTokenizer(), **options},
    )
    return batch, blocks


def shuffled(seed: int) -> Any:
    def order(requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        return random.Random(seed).sample(requests, len(requests))

    return order


@pytest.mark.parametrize(
    ("num_prompts", "samples", "block_rows"),
    [(6, 2, 4), (5, 2, 4), (7, 1, 3), (4, 3, 3), (2, 2, 8)],
)
def test_blocks_are_the_rows_of_the_batch_whatever_order_they_finish_in(
    num_prompts: int, samples: int, block_rows: int
) -> None:
    expected, none = sample(ScriptedBackend(), num_prompts, samples)
    assert none == []
    orders = set()
    for seed in range(20):
        backend = ScriptedBackend(order=shuffled(seed))
        batch, blocks = sample(backend, num_prompts, samples, block_rows=block_rows)
        assert_same(batch, expected)
        num_rows = num_prompts * samples
        assert sorted(index for index, _ in blocks) == list(range(-(-num_rows // block_rows)))
        for index, rows in blocks:
            start = index * block_rows
            assert_same(rows, expected.slice(start, min(start + block_rows, num_rows)))
        orders.add(tuple(index for index, _ in blocks))
    # One order of n blocks in all of 20 shuffles: n!**-19 if they were uniform.
    assert len(orders) > 1 or num_prompts * samples <= block_rows


def test_a_row_is_packed_and_decoded_before_the_next_completion_is_waited_for() -> None:
    told: list[str] = []

    def order(requests: Sequence[RolloutRequest]) -> Iterator[RolloutRequest]:
        for request in requests:
            told.append(f"row {request.row} ends")
            yield request

    class Noting(AsciiTokenizer):
        def decode(self, token_ids: Any, **kwargs: Any) -> Any:
            told.append("decoded")
            return super().decode(token_ids, **kwargs)

    sample(ScriptedBackend(order=order), 3, 1, tokenizer=Noting())
    assert told == [word for row in range(3) for word in (f"row {row} ends", "decoded")]


def test_a_block_leaves_before_the_next_completion_is_waited_for() -> None:
    told: list[str] = []

    def order(requests: Sequence[RolloutRequest]) -> Iterator[RolloutRequest]:
        for row in (2, 3, 0, 4, 1, 5):
            told.append(f"row {row}")
            yield requests[row]

    sample_experience(
        ScriptedBackend(order=order),
        number_prompts().slice("train", 0, 3),
        SamplingSpec(samples_per_prompt=2),
        run_seed=RUN_SEED,
        step=STEP,
        tokenizer=AsciiTokenizer(),
        progress=lambda *_: None,
        block_rows=2,
        on_block=lambda index, rows: told.append(f"block {index}"),
    )
    assert told == [
        *("row 2", "row 3", "block 1"),
        *("row 0", "row 4", "row 1", "block 0"),
        *("row 5", "block 2"),
    ]


def test_a_replica_hands_over_its_part_of_blocks_that_are_counted_over_the_batch() -> None:
    expected, _ = sample(ScriptedBackend(), 5, 2)
    batch, blocks = sample(ScriptedBackend(order=shuffled(1)), 5, 2, only=(1, 2, 3), block_rows=4)
    assert_same(batch, expected.slice(2, 8))
    assert_same(dict(blocks)[0], expected.slice(2, 4))
    assert_same(dict(blocks)[1], expected.slice(4, 8))
    assert len(blocks) == 2


def test_rows_are_what_their_seeds_draw() -> None:
    batch, _ = sample(ScriptedBackend(), 3, 2)
    prompts = number_prompts().slice("train", 0, 3)
    completions = batch["completion_text"].strings()
    for row, (prompt, index) in enumerate((p, i) for p in prompts for i in range(2)):
        seed = derive_seed(RUN_SEED, STEP, prompt.prompt_id, index)
        drawn = tokens_of_seed(RolloutRequest(row=0, prompt_tokens=[], seed=seed))
        assert completions[row] == "".join(map(chr, drawn))
    assert batch["sample_indexes"].values.tolist() == [0, 1] * 3


def test_another_lineage_draws_every_row_anew() -> None:
    first, again, other = (
        sample(ScriptedBackend(), 4, 2, lineage=lineage)[0]["completion_text"].strings()
        for lineage in (0, 0, 1)
    )
    assert first == again == sample(ScriptedBackend(), 4, 2)[0]["completion_text"].strings()
    assert all(one != another for one, another in zip(first, other, strict=True))


def test_the_data_says_whether_rows_have_the_column_of_images() -> None:
    """Rank 0 may have only prompts without images, while rank 1 has some with."""
    image = PromptImage.of(b"a picture", (1, 4, 6))
    shown, text = number_prompts().slice("train", 0, 2)
    shown = dataclasses.replace(shown, images=(image,))
    backend = ScriptedBackend()

    def sampled(prompts: Sequence[Prompt], *, has_images: bool) -> Experience:
        return sample_experience(
            backend,
            prompts,
            SamplingSpec(samples_per_prompt=2, max_new_tokens=8),
            run_seed=RUN_SEED,
            step=STEP,
            progress=lambda *_: None,
            tokenizer=AsciiTokenizer(),
            has_images=has_images,
        )

    both = sampled([shown, text], has_images=True)
    assert [images_of(row) for row in both["images"].strings()] == [(image,)] * 2 + [()] * 2
    assert [list(request.images) for request in backend.calls[0]] == [[image]] * 2 + [[]] * 2
    assert sampled([text], has_images=True)["images"].strings() == ["", ""]
    assert sampled([], has_images=True)["images"].strings() == []
    assert "images" not in sampled([text], has_images=False)
    without = sampled([dataclasses.replace(shown, images=()), text], has_images=False)
    rest = {name: column for name, column in both.columns.items() if name != "images"}
    assert_same(without, Experience(rest))


def test_a_rank_without_prompts_gets_columns_without_rows() -> None:
    batch, blocks = sample(ScriptedBackend(), 2, 2, only=(), block_rows=4)
    assert len(batch) == 0
    assert blocks == []


@pytest.mark.parametrize("block_rows", [3, -2])
def test_blocks_that_cut_a_prompts_samples_apart_are_refused(block_rows: int) -> None:
    with pytest.raises(
        ValueError, match=rf"block_rows is {block_rows}: give a multiple of .*\(2\)"
    ):
        sample(ScriptedBackend(), 4, 2, block_rows=block_rows)


def test_a_back_end_that_forgets_a_row_is_an_error() -> None:
    backend = ScriptedBackend(order=lambda requests: requests[:-1])
    with pytest.raises(RuntimeError, match="finished 5 of 6 completions"):
        sample(backend, 3, 2, block_rows=2)
