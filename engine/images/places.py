"""Where the images of a prompt stand among its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rolemesh.engine.images.processing import ImageTokens
from rolemesh.engine.images.prompt_images import Grid, ImageInvalidError


def image_starts(
    prompt: Sequence[int], grids: Sequence[Grid], tokens: ImageTokens, *, row: int
) -> list[int]:
    """First place of each image of a prompt whose placeholders are expanded.

    Images come with what is asked first. A prompt may go on with what a model has sampled: a
    placeholder behind those of the images is a token like any other.

    Args:
        prompt: Token ids.
        grids: Of the images, in their order.
        tokens: Of the model.
        row: Of the batch, for the error.

    Raises:
        ImageInvalidError: An image has more places than it takes, or fewer.
    """
    lengths = [tokens.number(grid) for grid in grids]
    num_found = sum(token == tokens.placeholder for token in prompt) if grids else 0
    has_more = num_found > sum(lengths)
    starts: list[int] = []
    end = 0
    for length in lengths:
        start = next(
            (at for at in range(end, len(prompt)) if prompt[at] == tokens.placeholder), len(prompt)
        )
        end = start + length
        stands = list(prompt[start:end]) == [tokens.placeholder] * length
        # Two images may stand side by side; a place too many shows behind the last one of an image.
        goes_on = has_more and end < len(prompt) and prompt[end] == tokens.placeholder
        if not stands or goes_on:
            raise ImageInvalidError(
                f"prompt of row {row} has {num_found} places for its {len(grids)} images, which "
                f"take {', '.join(map(str, lengths))}, each one behind the other: expand "
                "placeholders by the grids of this model's processor"
            )
        starts.append(start)
    return starts
