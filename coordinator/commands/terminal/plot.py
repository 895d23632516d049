"""Curves in a terminal, of Braille patterns: two by four dots a character."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from rich.text import Text

from rolemesh.coordinator.run.folders.comparison import Curve, share

WIDTH, HEIGHT = 64, 8
"""Characters of a plot, without its axes."""

_BLANK = 0x2800
# Bits of the dots of a character, by column and row (Unicode 15, chapter 21.1).
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def plot(
    curves: Sequence[tuple[Curve, str]], steps: tuple[int, int], values: tuple[float, float]
) -> Text:
    """Curves over each other; where two meet, the character has the style of the later one.

    Args:
        curves: Each with a style of rich.
        steps: First and last step of the axis.
        values: Least and greatest value of the axis.
    """
    dots = [[_BLANK] * WIDTH for _ in range(HEIGHT)]
    styles = [[""] * WIDTH for _ in range(HEIGHT)]
    for curve, style in curves:
        for x, y in _dots(curve, steps, values):
            row, column = y // 4, x // 2
            dots[row][column] |= _BITS[x % 2][y % 4]
            styles[row][column] = style
    labels = [f"{values[1]:.4g}", *[""] * (HEIGHT - 2), f"{values[0]:.4g}"]
    margin = max(len(label) for label in labels)
    drawn = Text()
    for label, row_dots, row_styles in zip(labels, dots, styles, strict=True):
        drawn.append(f"{label:>{margin}} |", "dim")
        while row_dots and row_dots[-1] == _BLANK:
            row_dots.pop()
        for dot, style in zip(row_dots, row_styles, strict=False):
            drawn.append(" " if dot == _BLANK else chr(dot), style)
        drawn.append("\n")
    first, last = f"step {steps[0]}", str(steps[1])
    drawn.append(" " * (margin + 2) + first + last.rjust(WIDTH - len(first)), "dim")
    return drawn


def _dots(
    curve: Curve, steps: tuple[int, int], values: tuple[float, float]
) -> Iterator[tuple[int, int]]:
    """Dots of the lines between the points of a curve, from the top left corner."""
    places = [
        (
            round(share(point.step, *steps) * (2 * WIDTH - 1)),
            round((1 - share(point.value, *values)) * (4 * HEIGHT - 1)),
        )
        for point in curve.points
    ]
    yield places[0]
    for (x, y), (next_x, next_y) in itertools.pairwise(places):
        num_dots = max(abs(next_x - x), abs(next_y - y), 1)
        for n in range(1, num_dots + 1):
            yield x + round((next_x - x) * n / num_dots), y + round((next_y - y) * n / num_dots)
