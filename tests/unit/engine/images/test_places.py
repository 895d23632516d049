"""Where images stand in prompts, and requests that show some."""

from __future__ import annotations

import pytest

from rolemesh.engine.images.places import image_starts
from rolemesh.engine.images.processing import ImageTokens
from rolemesh.engine.images.prompt_images import Grid, ImageInvalidError, PromptImage
from rolemesh.engine.rollout.requests import RolloutRequest, check_requests

P = 9
TOKENS = ImageTokens(placeholder=P, merge=2)
TWO: Grid = (1, 2, 4)
"""Of two tokens."""
ONE: Grid = (1, 2, 2)


@pytest.mark.parametrize(
    ("prompt", "grids", "starts"),
    [
        ([1, P, P, 2], [TWO], [1]),
        ([P, P, 1, P, 2], [TWO, ONE], [0, 3]),
        ([1, P, P, P], [TWO, ONE], [1, 3]),  # side by side
        ([1, P, P, 2, P, P, P], [TWO], [1]),  # those behind were sampled
        ([1, P, 2], [], []),
        ([1, 2], [], []),
    ],
)
def test_each_image_has_its_places(prompt: list[int], grids: list[Grid], starts: list[int]) -> None:
    assert image_starts(prompt, grids, TOKENS, row=0) == starts


@pytest.mark.parametrize(
    ("prompt", "grids", "found"),
    [
        ([1, P, 2], [TWO], 1),
        ([1, P, 2, P], [TWO], 2),  # not behind each other
        ([1, P, P, P, 2], [TWO], 3),
        ([1, P, P], [TWO, ONE], 2),
        ([1, P, P, P, 2, P], [TWO, ONE], 4),  # the first has one of the second's
        ([1, 2], [ONE], 0),
        ([1, P], [TWO], 1),
    ],
)
def test_places_that_do_not_fit_are_told_by_row_and_number(
    prompt: list[int], grids: list[Grid], found: int
) -> None:
    with pytest.raises(ImageInvalidError, match=rf"prompt of row 3 has {found} places"):
        image_starts(prompt, grids, TOKENS, row=3)


def test_requests_with_images_need_a_model_that_takes_them() -> None:
    shown = RolloutRequest(
        row=4, prompt_tokens=[1, P, P], seed=0, images=[PromptImage.of(b"PNG", TWO)]
    )
    check_requests([shown], max_model_len=8, vocab_size=16, image_tokens=TOKENS)
    with pytest.raises(ValueError, match=r"row 4 has images, but this model takes none"):
        check_requests([shown], max_model_len=8, vocab_size=16, image_tokens=None)
