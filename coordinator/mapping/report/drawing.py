"""A predicted step as a timeline: a row for each pool, in text or as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from rolemesh.coordinator.mapping.report.report import Plan, PlannedTask

_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_COLOURS = ("#2a9d8f", "#e9a23b", "#577590", "#c8553d", "#6a4c93", "#8ab17d", "#8d6e63")
_ROW, _LEFT, _WIDTH, _TOP = 34, 130, 760, 40


def _rows(plan: Plan) -> list[tuple[str, list[tuple[str, PlannedTask]]]]:
    """Names of the rows, each with its tasks and their marks, without tasks of no length."""
    marked = [
        (_MARKS[index % len(_MARKS)], task)
        for index, task in enumerate(plan.tasks)
        if task.end - task.start > 1e-3 * plan.period
    ]
    names = [pool.name for pool in plan.pools]
    if any(not task.pool for _, task in marked):
        names.append("")
    return [(name, [one for one in marked if one[1].pool == name]) for name in names]


def text_timeline(plan: Plan, width: int = 60) -> list[str]:
    """Lines of a timeline: a letter for each task, and what the letters mean.

    Args:
        plan: The plan.
        width: Characters of a step.
    """
    length = max([plan.period, *(task.end for task in plan.tasks)])
    lines, legend = [], []
    for name, tasks in _rows(plan):
        cells = ["."] * width
        for mark, task in tasks:
            start = min(width - 1, int(width * task.start / length))
            stop = max(start + 1, round(width * task.end / length))
            cells[start:stop] = mark * (stop - start)
            legend.append((mark, task))
        lines.append(f"{name or 'no device':>12} |{''.join(cells[:width])}|")
    lines.append(f"{'':>12} 0{f'{length:.3g} s':>{width}}")
    for mark, task in sorted(legend, key=lambda one: one[1].start):
        ahead = " (for a later step)" if task.is_ahead else ""
        lines.append(f"{mark:>12}  {task.name} {task.end - task.start:.3g} s{ahead}")
    return lines


def svg_timeline(plan: Plan, title: str) -> str:
    """The same as an SVG document, readable on light and dark pages."""
    length = max([plan.period, *(task.end for task in plan.tasks)])
    rows = _rows(plan)
    roles = list(dict.fromkeys(task.name.partition(".")[0] for _, one in rows for _, task in one))
    height = _TOP + _ROW * len(rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="#ffffff"/><text x="10" y="22" font-size="14">'
        f"{escape(title)}</text>",
    ]
    for number, (name, tasks) in enumerate(rows):
        top = _TOP + number * _ROW
        parts.append(f'<text x="10" y="{top + 20}">{escape(name or "no device")}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_ROW - 6}" fill="#eeeeee"/>'
        )
        parts += [_bar(task, roles, length, top) for _, task in tasks]
    parts += _axis(length, _TOP + _ROW * len(rows) + 14)
    return "\n".join((*parts, "</svg>\n"))


def _bar(task: PlannedTask, roles: Sequence[str], length: float, top: int) -> str:
    left = _LEFT + _WIDTH * task.start / length
    wide = max(1.0, _WIDTH * (task.end - task.start) / length)
    colour = _COLOURS[roles.index(task.name.partition(".")[0]) % len(_COLOURS)]
    told = f"{task.name} {task.end - task.start:.3g} s"
    label = ""
    if wide > 7 * len(task.name):
        label = f'<text x="{left + 4:.1f}" y="{top + 19}" fill="#ffffff">{escape(task.name)}</text>'
    return (
        f'<g><title>{escape(told)}</title><rect x="{left:.1f}" y="{top}" width="{wide:.1f}" '
        f'height="{_ROW - 6}" fill="{colour}" stroke="#ffffff"/>{label}</g>'
    )


def _axis(length: float, top: int) -> list[str]:
    return [
        f'<text x="{_LEFT + _WIDTH * part / 4:.0f}" y="{top}" text-anchor="middle">'
        f"{length * part / 4:.3g} s</text>"
        for part in range(5)
    ]
