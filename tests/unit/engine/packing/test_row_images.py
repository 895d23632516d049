"""Images of rows: which tokens are whose, which rows begin alike, and where all stand packed."""

from __future__ import annotations

import pytest
import torch

from rolemesh.engine.experience import Experience
from rolemesh.engine.images.processing import ImageTokens
from rolemesh.engine.images.prompt_images import ImageInvalidError, PromptImage, images_text
from rolemesh.engine.packing.packed_rows import pack_rows
from rolemesh.engine.packing.pass_cost import PassCost
from rolemesh.engine.packing.row_images import RowImages

PAD = 9
TOKENS = ImageTokens(placeholder=PAD, merge=2)
SMALL = PromptImage.of(b"small", (1, 2, 4))
OTHER = PromptImage.of(b"other", (1, 2, 4))
LARGE = PromptImage.of(b"large", (1, 4, 4))
SHARED = PassCost(pairs_per_token=float("inf"), pairs_per_call=100.0, margin=float("inf"))


def rows(*given: tuple[list[int], int, list[PromptImage]]) -> Experience:
    """Of each row its tokens, how many are the prompt, and its images."""
    tokens, prompts, images = zip(*given, strict=True)
    return Experience.of_rows(
        {
            "tokens": list(tokens),
            "prompt_lengths": list(prompts),
            "images": [images_text(one) for one in images],
        }
    )


def test_a_sampled_placeholder_is_a_token_like_any_other() -> None:
    """It has no place of an image, and counts on as text does."""
    found = RowImages.of(rows(([1, PAD, PAD, 2, 3, PAD, 4], 4, [SMALL])), TOKENS)
    assert found is not None
    assert found.sources[0].tolist() == [-1, 0, 1, -1, -1, -1, -1]
    # An image of one row and two columns: what follows goes on behind its two columns.
    assert found.positions[0].tolist() == [
        [0, 1, 1, 3, 4, 5, 6],
        [0, 1, 1, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 6],
    ]


def test_rows_share_what_shows_the_same_images_and_no_more() -> None:
    """Samples of one prompt are one branch up to their answers; another image is another branch."""
    batch = rows(
        ([1, PAD, PAD, 2, 5], 4, [SMALL]),
        ([1, PAD, PAD, 2, 6], 4, [SMALL]),
        ([1, PAD, PAD, 2, 5], 4, [OTHER]),
    )
    images = RowImages.of(batch, TOKENS)
    packed = pack_rows(batch, "cpu", SHARED, images=images)
    # The first token is all rows'; from the image on there are two prompts, and three answers.
    assert packed.tokens_1S.shape[1] == 1 + 2 * 3 + 3
    assert packed.images is not None
    assert {one.sha256 for one in packed.images.images} == {SMALL.sha256, OTHER.sha256}
    assert sorted(packed.images.index_M.tolist()) == [0, 1, 2, 3]
    assert packed.tokens_1S[0][packed.images.places_M].tolist() == [PAD] * 4


def test_a_pass_has_the_images_that_it_shows() -> None:
    """Of a batch with three, the row of the last one needs that alone, counted from its own 0."""
    batch = rows(
        ([1, PAD, PAD, 2, 5], 4, [SMALL]),
        ([1, PAD, PAD, PAD, PAD, PAD, PAD, 5], 7, [OTHER, LARGE]),
        ([7, 8], 1, []),
    )
    images = RowImages.of(batch, TOKENS)
    assert images is not None
    assert [one.sha256 for one in images.images] == [SMALL.sha256, OTHER.sha256, LARGE.sha256]
    part = batch.select(torch.tensor([1]))
    packed = pack_rows(part, "cpu", images=images.select([1]))
    assert packed.images is not None
    assert packed.images.images == (OTHER, LARGE)
    assert packed.images.index_M.tolist() == [0, 1, 2, 3, 4, 5]
    text = pack_rows(batch.select(torch.tensor([2])), "cpu", images=images.select([2]))
    assert text.images is None


def test_rows_without_images_have_none_whatever_the_model() -> None:
    batch = rows(([1, PAD, 2], 2, []))
    assert RowImages.of(batch, None) is None
    assert RowImages.of(batch, TOKENS) is None


def test_a_model_without_images_refuses_those_of_a_row() -> None:
    with pytest.raises(ImageInvalidError, match="this model takes none"):
        RowImages.of(rows(([1, PAD, PAD, 2], 3, [SMALL])), None)
