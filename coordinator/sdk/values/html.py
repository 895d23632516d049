"""Small pieces of HTML for notebooks; everything that is shown is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

_MAX_CELL_CHARACTERS = 200


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a line of names."""
    head = "".join(f"<th>{_text(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def definition_list(facts: Mapping[str, object]) -> str:
    """Names and values; those without one are left out."""
    return table(
        ("", ""), [(name, value) for name, value in facts.items() if value not in (None, "")]
    )


def _text(value: object) -> str:
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if len(text) > _MAX_CELL_CHARACTERS:
        text = text[:_MAX_CELL_CHARACTERS] + " ..."
    return html.escape(text)
