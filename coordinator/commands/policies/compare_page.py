"""Comparison of runs as one HTML file: no script, nothing from elsewhere, all text escaped."""

from __future__ import annotations

import html
import importlib.resources
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence

from rolemesh.coordinator import dashboard
from rolemesh.coordinator.commands.policies.table import DIFFERENCES, ERRORS
from rolemesh.coordinator.explained.metrics import explanation
from rolemesh.coordinator.run.folders.comparison import (
    Comparison,
    Curve,
    Point,
    extent,
    share,
    shown,
)

_WIDTH, _HEIGHT = 560, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 8, 22
"""Room for the axes of a chart, in its own units like its size."""

_COLOURS = 8
"""As many as the dashboard has for lines; a further run gets one of them again, dashed."""

_MAX_POINTS = 600
"""Of a longer curve, the least and the greatest value of neighbours are drawn."""

_FEW_POINTS = 24
"""Up to so many are drawn as dots, too."""

_OWN_STYLE = """
body { padding: 12px 16px 32px; max-width: 1400px; margin: 0 auto; }
h1 { font-size: 18px; } h2 { font-size: 14px; margin: 22px 0 8px; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: 10px; }
figure .card { border: 0; padding: 4px 0 0; }
.charts { display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fill, minmax(min(36rem, 100%), 1fr)); }
figure, p { margin: 0; } .quiet { color: var(--quiet); } .scroll { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--quiet); font-size: 11px; }
svg .grid { stroke: var(--grid); } svg .line { fill: none; stroke-width: 1.6; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 3px 10px 3px 0; text-align: left; vertical-align: top; font-weight: 400;
  border-bottom: 1px solid var(--grid); overflow-wrap: anywhere; }
th { color: var(--quiet); } th, td:first-child { white-space: nowrap; }
td.number { text-align: right; white-space: nowrap; }
body { background: var(--page); color: var(--text); font: 13px/1.45 system-ui, sans-serif;
  font-variant-numeric: tabular-nums; }
"""


class _Markup(str):
    """Text that is HTML already. Any other text is escaped where it enters."""

    __slots__ = ()


def page(found: Comparison, metrics: Sequence[str]) -> str:
    """The whole file.

    Args:
        found: The runs.
        metrics: Names of metrics that a run has; each gets a chart.
    """
    title = f"{len(found.runs)} runs: {', '.join(run.label for run in found.runs)}"
    charts = [_figure(found, name) for name in metrics]
    body = _tag(
        "body",
        _tag("h1", title),
        _tag("p", f"compared at {time.strftime('%Y-%m-%d %H:%M')}", class_="quiet"),
        _tag("h2", "Runs"),
        _runs(found),
        *(_tag("p", note, class_="quiet") for note in found.notes()),
        _tag("h2", "Curves"),
        _tag("div", *charts, class_="charts")
        if charts
        else _tag("p", "No two runs have a metric in common."),
        *_evaluations(found),
        _tag("h2", "Where the recipes differ"),
        _differences(found),
    )
    head = _tag(
        "head",
        _Markup('<meta charset="utf-8">'),
        # Whatever the text of a recipe is: the file loads nothing and runs nothing.
        _Markup(
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        ),
        _Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        _tag("title", title),
        _Markup(f"<style>{_colours()}{_OWN_STYLE}</style>"),
    )
    return f'<!doctype html>\n<html lang="en">\n{head}\n{body}\n</html>\n'


def _colours() -> str:
    """The first part of the dashboard's style: its colours, for light and dark."""
    style = importlib.resources.files(dashboard).joinpath("style.css").read_text("utf-8")
    return style.partition("\n\n* {")[0]


def _tag(name: str, *inner: str, class_: str = "", **attributes: object) -> _Markup:
    """An element; text within and in attributes is escaped unless it is markup."""
    given = {**({"class": class_} if class_ else {}), **attributes}
    written = "".join(
        f' {key.replace("_", "-")}="{html.escape(str(value))}"' for key, value in given.items()
    )
    text = "".join(one if isinstance(one, _Markup) else html.escape(one) for one in inner)
    return _Markup(f"<{name}{written}>{text}</{name}>")


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]], numbers: int = 0) -> _Markup:
    """A table; of each row, cells from the place `numbers` on are numbers, if that is above 0."""
    head = _tag("tr", *(_tag("th", one) for one in headings))
    body = [
        _tag(
            "tr",
            *(
                _tag("td", cell, class_="number" if 0 < numbers <= place else "")
                for place, cell in enumerate(row)
            ),
        )
        for row in rows
    ]
    table = _tag("table", _tag("thead", head), _tag("tbody", *body))
    return _tag("div", table, class_="scroll card")


def _runs(found: Comparison) -> _Markup:
    headings = ("run", "folder", "id", "algorithm", "state", "steps", "recovered")
    rows = [
        (
            _label(found, place),
            run.status.directory,
            run.run_id,
            run.algorithm,
            run.status.state + (f": {run.status.failure}" if run.status.failure else ""),
            f"{run.status.step} of {'?' if run.status.num_steps is None else run.status.num_steps}",
            f"{run.status.recoveries} times" if run.status.recoveries else "-",
            run.held_out(lambda curve: curve.first),
            run.held_out(lambda curve: curve.highest),
            run.held_out(lambda curve: curve.last),
        )
        for place, run in enumerate(found.runs)
    ]
    return _table((*headings, "held out, first", "best", "last"), rows)


def _label(found: Comparison, place: int) -> _Markup:
    """Name of a run behind a piece of its line."""
    line = _tag("line", x1=0, y1=5, x2=22, y2=5, class_="line", style=_line_style(place))
    key = _tag("svg", line, viewBox="0 0 24 10", style="display: inline; width: 24px; height: 10px")
    return _Markup(key + " " + html.escape(found.runs[place].label))


def _line_style(place: int) -> str:
    dashes = "; stroke-dasharray: 5 3" if place >= _COLOURS else ""
    return f"stroke: var(--line-{place % _COLOURS + 1}){dashes}"


def _figure(found: Comparison, name: str) -> _Markup:
    rows = [
        (_label(found, place), *found.cells(run.curves.get(name)))
        for place, run in enumerate(found.runs)
    ]
    return _tag(
        "figure",
        _tag(
            "figcaption",
            _tag("strong", name),
            " ",
            _tag("span", explanation(name) or "", class_="quiet"),
        ),
        _chart([run.curves.get(name) for run in found.runs], name),
        _table(("run", *found.headings()), rows, numbers=1),
        class_="card",
    )


def _chart(curves: Sequence[Curve | None], name: str) -> _Markup:
    steps, (low, high) = extent([curve for curve in curves if curve is not None])
    if not high / 2 > low / 2:
        low, high = low - (abs(low) or 1) / 10, high + (abs(high) or 1) / 10

    def to_x(step: float) -> float:
        return round(_LEFT + share(step, *steps) * (_WIDTH - _LEFT - _RIGHT), 1)

    def to_y(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - share(value, low, high) * (_HEIGHT - _TOP - _BOTTOM), 1)

    drawn: list[_Markup] = [_tag("title", f"{name} by step")]
    for value in _ticks(low, high, 4):
        y = to_y(value)
        drawn.append(_tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
        drawn.append(_tag("text", f"{value:.4g}", x=_LEFT - 6, y=y + 4, text_anchor="end"))
    for step in _ticks(*steps, 6):
        if step == int(step):
            drawn.append(
                _tag("text", f"{step:.0f}", x=to_x(step), y=_HEIGHT - 6, text_anchor="middle")
            )
    for place, curve in enumerate(curves):
        if curve is not None:
            drawn += _line([(to_x(p.step), to_y(p.value)) for p in _thinned(curve.points)], place)
    return _tag("svg", *drawn, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=name)


def _line(points: Sequence[tuple[float, float]], place: int) -> Iterator[_Markup]:
    style = _line_style(place)
    joined = " ".join(f"{x},{y}" for x, y in points)
    yield _tag("polyline", points=joined, class_="line", style=style)
    if len(points) <= _FEW_POINTS:
        for x, y in points:
            yield _tag("circle", cx=x, cy=y, r=2.5, style=style.replace("stroke:", "fill:"))


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most _MAX_POINTS, so that no spike is lost."""
    if len(points) <= _MAX_POINTS:
        return points
    size = -(-len(points) // (_MAX_POINTS // 2))
    kept: list[Point] = []
    for start in range(0, len(points), size):
        some = points[start : start + size]
        ends = {min(some, key=lambda p: p.value), max(some, key=lambda p: p.value)}
        kept += sorted(ends, key=lambda p: p.step)
    return kept


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from low to high: multiples of 1, 2 or 5 times a power of ten."""
    rough = high / about - low / about
    if not rough > 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(n * power for n in (1, 2, 5, 10) if n * power >= rough * 0.999)
    first = math.ceil(low / size)
    ticks = (round(n * size, 12) if size > 1e-9 else n * size for n in itertools.count(first))
    return list(itertools.islice(itertools.takewhile(lambda tick: tick <= high, ticks), 20))


def _evaluations(found: Comparison) -> Iterator[_Markup]:
    """What `rolemesh evaluate` says of runs, the first evaluated one against each other."""
    headings = ("task", "first", "second", "shared prompts", "first", "second", "difference")
    rows = []
    for one, other, compared in found.evaluations():
        for each in compared:
            scores = [
                "-" if score is None else score.told()
                for score in (each.one.score(), each.other.score())
            ]
            told = each.difference
            shared = ("none", "-") if told is None else (str(told.num_prompts), told.told())
            rows.append((each.task, one.label, other.label, shared[0], *scores, shared[1]))
    if rows:
        yield _tag("h2", "Evaluations: the second minus the first")
        yield _table(headings, rows, numbers=3)
        yield _tag("p", f"{ERRORS} {DIFFERENCES}", class_="quiet")


def _differences(found: Comparison) -> _Markup:
    if not found.differences:
        return _tag("p", "The recipes do not differ.")
    labels = [_label(found, place) for place in range(len(found.runs))]
    rows = [(name, *map(shown, values)) for name, values in found.differences.items()]
    return _table(("field", *labels), rows)
