"""Writer of the tables in from-others.md, from the facts that `rolemesh import` works by.

    python docs/others.py    # puts them into the page

A test holds the page to them.
"""

from __future__ import annotations

import re
from pathlib import Path

from rolemesh.coordinator.imports.recipe import TOPICS

PAGE = Path(__file__).with_name("from-others.md")


def with_tables(text: str) -> str:
    """The page with its tables as the facts have them: the first one below each topic's title."""
    for topic in TOPICS:
        pattern = rf"(^## {re.escape(topic.title)}\n(?:(?!^[|#]).*\n)*?)(?:^\|.*\n)+"
        text, count = re.subn(
            pattern, lambda found, topic=topic: found[1] + topic.table(), text, flags=re.MULTILINE
        )
        assert count == 1, f"from-others.md has no table below the title {topic.title!r}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
