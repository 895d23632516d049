"""YAML of plain data alone: no objects, and no aliases, of which few could stand for very much."""

from __future__ import annotations

from typing import Any

import yaml


class _PlainLoader(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.composer.ComposerError(
                None, None, "aliases (*name) are not read: write out the value", mark
            )
        return super().compose_node(parent, index)


def plain_yaml(text: str) -> Any:
    """The data; raises yaml.YAMLError, or RecursionError where it is nested very deeply."""
    # A subclass of SafeLoader.
    return yaml.load(text, _PlainLoader)
