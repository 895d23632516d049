"""A recipe on its way: its tree, what is said beside it, and the text of both."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

_WIDTH = 98
_ORDER = (
    *("run", "algorithm", "actor", "critic", "reference", "teacher", "rollout", "reward"),
    *("schedule", "pools", "services", "trackers"),
)
FILL_IN = "FILL IN"
_PLAIN = re.compile(r"[A-Za-z.~/][\w./~-]*")


class Draft:
    """A recipe that facts are put into.

    Example: put("run.steps", 5) makes run: {steps: 5}.
    """

    def __init__(self) -> None:
        """Begins with nothing."""
        self.tree: dict[str, Any] = {}
        self._comments: dict[str, list[str]] = {}
        self.missing: list[str] = []
        """Fields with a value that only the user can give."""
        self.kept: dict[str, Any] = {}
        """Values of sections that may come later."""

    def put(self, path: str, value: Any, comment: str | None = None) -> None:
        """Sets a key, and says something above it."""
        *above, last = path.split(".")
        node = self.tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = value
        if comment is not None:
            self.say(path, comment)

    def keep(self, path: str, value: Any) -> None:
        """Keeps a value for a section that is put later, if at all."""
        self.kept[path] = value

    def get(self, path: str) -> Any:
        """The value of a key; None where it has none."""
        node: Any = self.tree
        for key in path.split("."):
            if not isinstance(node, Mapping) or key not in node:
                return None
            node = node[key]
        return node

    def say(self, path: str, comment: str) -> None:
        """Says something above a key."""
        self._comments.setdefault(path, []).append(comment)

    def fill_in(self, path: str, value: Any, comment: str) -> None:
        """Sets a key to a placeholder that the user has to replace."""
        self.put(path, value, f"{FILL_IN}: {comment}")
        self.missing.append(path)

    def body(self) -> tuple[dict[str, Any], dict[str, list[str]]]:
        """The tree and what is said beside it, to be compared with those of another one."""
        return self.tree, self._comments

    def text(self, head: Sequence[str], foot: Sequence[str]) -> str:
        """The recipe with its comments between two blocks of comments."""
        lines = [*comment_lines(head), ""]
        for name in sorted(self.tree, key=_ORDER.index):
            lines += [*self._entry(name, name, self.tree[name], ""), ""]
        return "\n".join([*lines, *comment_lines(foot)]).rstrip() + "\n"

    def _entry(self, key: str, path: str, value: Any, indent: str) -> Iterator[str]:
        for comment in self._comments.get(path, ()):
            yield from _wrapped(comment, indent)
        below = f"{path}."
        is_said = any(place.startswith(below) for place in self._comments)
        if isinstance(value, dict) and value and (is_said or not _is_short(value)):
            yield f"{indent}{key}:"
            for inner, part in value.items():
                yield from self._entry(inner, f"{path}.{inner}", part, f"{indent}  ")
        elif isinstance(value, list) and len(value) > 1 and isinstance(value[0], dict):
            yield f"{indent}{key}:"
            for part in value:
                yield from self._item(part, path, indent)
        elif isinstance(value, list):
            yield from textwrap.wrap(
                f"{indent}{key}: {inline(value)}",
                _WIDTH,
                subsequent_indent=f"{indent}  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        else:
            yield f"{indent}{key}: {inline(value)}"

    def _item(self, part: dict[str, Any], path: str, indent: str) -> Iterator[str]:
        """An entry of a list: in one line where that is short."""
        text = f"{indent}  - {inline(part)}"
        if len(text) <= _WIDTH:
            yield text
            return
        for number, (name, value) in enumerate(part.items()):
            first, *rest = self._entry(name, f"{path}.{number}.{name}", value, f"{indent}    ")
            yield f"{indent}  - {first.lstrip()}" if number == 0 else first
            yield from rest


def _is_short(value: Mapping[str, Any]) -> bool:
    return len(inline(value)) < _WIDTH // 2 and not any(isinstance(v, dict) for v in value.values())


def _wrapped(comment: str, indent: str) -> list[str]:
    lead = f"{indent}# "
    return textwrap.wrap(
        _one_line(comment),
        _WIDTH,
        initial_indent=lead,
        subsequent_indent=lead,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _one_line(text: str) -> str:
    """A text without characters that could end a comment."""
    return "".join(char if char.isprintable() else " " for char in text)


def comment_lines(lines: Sequence[str]) -> list[str]:
    """Lines of a block of comments; what is indented keeps its indent where it is wrapped."""
    made: list[str] = []
    for given in lines:
        line = _one_line(given)
        inner = " " * (len(line) - len(line.lstrip()))
        if not line.strip():
            made.append("#")
            continue
        made += textwrap.wrap(
            line.strip(), _WIDTH, initial_indent=f"# {inner}", break_long_words=False,
            subsequent_indent=f"# {inner}{'  ' if inner else ''}", break_on_hyphens=False,
        )  # fmt: skip
    return made


def inline(value: Any) -> str:
    """A value as YAML in one line."""
    match value:
        case str():
            plain = _PLAIN.fullmatch(value) and yaml.safe_load(value) == value
            return value if plain else json.dumps(value, ensure_ascii=False)
        case dict():
            return f"{{{', '.join(f'{key}: {inline(part)}' for key, part in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(inline(part) for part in value)}]"
        case bool() | None:
            return json.dumps(value)
        case float():
            return _float(value)
        case _:
            return str(value)


def _float(value: float) -> str:
    """Short, and with the dot that YAML asks of numbers with an exponent."""
    text = f"{value:.10g}"
    mantissa, e, exponent = text.partition("e")
    dotted = mantissa if "." in mantissa else f"{mantissa}.0"
    return f"{dotted}e{int(exponent)}" if e else dotted
