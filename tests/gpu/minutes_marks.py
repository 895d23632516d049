"""What the figures of a report are held against. Standard library alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Found = Mapping[str, Mapping[str, Any]]
"""What the parts have found, by part."""


def best_mfu(found: Found) -> float | None:
    """Of the settings on rows of one length, the best."""
    return max(_of_settings(found, "mfu"), default=None)


def ragged_over_fixed(found: Found) -> float | None:
    """Tokens/s on rows of many lengths over those on as many rows of one length.

    New lengths, as every step of a run has them; default attention; the worse of sharing prompts
    and not.
    """
    fixed = _at(found, "speed_ragged", "fixed", "tokens_per_s")
    ragged = [
        rate
        for way in ("cudnn 0, shared", "cudnn 0, never")
        if (rate := _at(found, "speed_ragged", "ragged", way, "tokens_per_s_first"))
    ]
    return min(ragged) / fixed if fixed and len(ragged) == 2 else None


def peak_over_fit(found: Found) -> float | None:
    """The largest difference between a peak and its estimate, as a part of the estimate."""
    peaks = _of_settings(found, "peak_over_fit")
    return max((abs(ratio - 1) for ratio in peaks), default=None)


def second_sleep(found: Found) -> float | None:
    """GB/s of a sleep whose host memory is there."""
    return _at(found, "memory", "sleep", 1, "gb_per_s")


def later_cut(found: Found) -> float | None:
    """GB/s of a cut into slots that are there: the third, since there are two of them."""
    return _at(found, "memory", "cut", 2, "gb_per_s")


MARKS: tuple[tuple[str, str, float, Callable[[Found], float | None]], ...] = (
    ("best setting, MFU", "at least", 0.20, best_mfu),
    ("ragged over fixed, tokens/s", "at least", 0.60, ragged_over_fixed),
    ("peak against fit, difference", "at most", 0.15, peak_over_fit),
    ("second sleep, GB/s", "at least", 20.0, second_sleep),
    ("cut, GB/s", "at least", 15.0, later_cut),
)
"""Name, how, aim, and where the value comes from."""


def marks(found: Found, *, is_rehearsal: bool) -> Iterator[dict[str, Any]]:
    """A line for each mark; "reached" is None where nothing was measured, or on no GPU."""
    for name, how, aim, compute in MARKS:
        value = compute(found)
        reached = None
        if value is not None and not is_rehearsal:
            reached = value >= aim if how == "at least" else value <= aim
        yield {
            "mark": name,
            "aim": f"{how} {aim:g}",
            "value": None if value is None else round(value, 4),
            "reached": reached,
        }


def _of_settings(found: Found, name: str) -> list[float]:
    settings = found.get("speed_fixed", {}).get("settings", {})
    told = [one.get(name) for one in settings.values() if isinstance(one, Mapping)]
    return [value for value in told if value is not None]


def _at(found: Any, *keys: str | int) -> float | None:
    for key in keys:
        try:
            found = found[key]
        except (KeyError, IndexError, TypeError):
            return None
    return None if found is None else float(found)
