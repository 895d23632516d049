"""Rotary positions of rows with images (M-RoPE, arXiv 2409.12191, section 2.1).

Shape letters: T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rolemesh.engine.images.prompt_images import Grid


def mrope_positions(
    num_tokens: int, starts: Sequence[int], grids: Sequence[Grid], merge: int
) -> torch.Tensor:
    """Time, height and width of each token of a row.

    Text counts on by one in all three. An image's tokens have one time, and rows and columns from
    there; what follows goes on behind the longer of its sides.

    Example: a token, an image of 2 x 3 merged patches, a token: time 0 1 1 1 1 1 1 4, height
    0 1 1 1 2 2 2 4, width 0 1 2 3 1 2 3 4.

    Args:
        num_tokens: T.
        starts: First place of each image, ascending.
        grids: Of the images, in patches.
        merge: So many patches, squared, are one token.

    Returns:
        int64 [3, T].
    """
    parts: list[torch.Tensor] = []
    place = position = 0
    for start, (frames, height, width) in zip(starts, grids, strict=True):
        text = torch.arange(position, position + start - place)
        parts.append(text.expand(3, -1))
        position += start - place
        rows, columns = height // merge, width // merge
        axes = [torch.arange(size) + position for size in (frames, rows, columns)]
        parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1))
        place = start + frames * rows * columns
        position += max(rows, columns)
    parts.append(torch.arange(position, position + num_tokens - place).expand(3, -1))
    return torch.cat(parts, 1)
