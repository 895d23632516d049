"""Prompts without a rendering of each: fixed texts around the contents of turns.

Most chat templates only copy what a turn says. For those it is proven, once for each sequence of
roles, what stands between the contents; a template of which nothing can be proven has no frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2 import filters, nodes

from rolemesh.engine.data.rows import PromptRow

_MOST_FRAMES = 64
"""Data may have any roles in any order; of other sequences each row is rendered."""

_NODES = (
    *(nodes.Template, nodes.TemplateData, nodes.Output, nodes.Const, nodes.Name, nodes.NSRef),
    *(nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Add, nodes.Sub, nodes.Neg),
    *(nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand, nodes.CondExpr, nodes.Test),
    *(nodes.If, nodes.For, nodes.Break, nodes.Continue, nodes.Assign, nodes.Call, nodes.Keyword),
    *(nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.Filter, nodes.Mod),
)
"""What a template may consist of. Not of what makes plain text of its operands (`~`, macros, set
blocks): then nobody notices who looks at that."""
_TESTS = ("defined", "undefined", "none", "string", "mapping")
"""Tests that are true or false for any text alike."""
_CALLED = ("namespace", "raise_exception")
"""Functions that may be called."""


class _LookedAt(Exception):
    """A template did more with a content than to copy it."""


def _looked_at(*_: Any, **__: Any) -> Any:
    raise _LookedAt


class _Unknown(str):
    """Stands for any text that is not empty: it can be joined to others and written, no more."""

    def __add__(self, other: str) -> _Unknown:
        return _Unknown(str.__add__(self, other))

    def __radd__(self, other: str) -> _Unknown:
        return _Unknown(str.__add__(other, self))

    def __str__(self) -> str:
        # Not a plain text, of which nobody would notice who looks at it.
        return self

    def __bool__(self) -> bool:
        return True

    def __getattribute__(self, name: str) -> Any:
        # isinstance asks for it.
        return type(self) if name == "__class__" else _looked_at()


LOOKS = (
    *("__contains__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__format__", "__getitem__", "__hash__", "__iter__", "__len__", "__repr__"),
    *("__mod__", "__rmod__", "__mul__", "__rmul__"),
)
"""Methods by which more can be known of a text."""
for _name in LOOKS:
    setattr(_Unknown, _name, _looked_at)


class _Content(_Unknown):
    """Stands for any whole content that neither begins nor ends with white space."""


class Frames:
    r"""Texts of the prompts of one tokenizer, as far as they need no rendering.

    Proof: the template is rendered with contents that raise whenever anything but joining and
    writing is done with them, by an environment that knows no other filters, tests and functions
    than those that do not look at them either. So its way through the template is the same for all
    contents, and what it writes is made of them and of fixed texts alone.

    Example: ChatML has for the roles ("user",) the frame "<|im_start|>user\n%s<|im_end|>\n...".
    """

    def __init__(self, tokenizer: Any) -> None:
        """Takes the tokenizer whose chat template renders."""
        self._tokenizer = tokenizer
        self._template = _strict_template(tokenizer)
        self._frames: dict[tuple[str, ...], str | None] = {}

    def text(self, row: PromptRow) -> str | None:
        """What the template makes of the turns, with the opening of the answer; None: unknown."""
        if self._template is None:
            return None
        roles, contents = [], []
        for turn in row.messages:
            role, content = turn.get("role"), turn.get("content")
            if (
                len(turn) != 2
                or type(role) is not str
                or type(content) is not str
                # Some templates look whether there is any, or take white space around it away.
                or not content
                or content != content.strip()
            ):
                return None
            roles.append(role)
            contents.append(content)
        key = tuple(roles)
        if key not in self._frames:
            if len(self._frames) == _MOST_FRAMES:
                return None
            self._frames[key] = self._frame(key, contents)
        frame = self._frames[key]
        return None if frame is None else frame % tuple(contents)

    def _frame(self, roles: Sequence[str], contents: Sequence[str]) -> str | None:
        """Text with a %s for each content, tried on the contents of a row; None: not proven."""
        marks = [f"<content {number} 5e1c>" for number in range(len(roles))]
        turns = [
            {"role": role, "content": content}
            for role, content in zip(roles, contents, strict=True)
        ]
        try:
            text = self._rendered(roles, [_Content(mark) for mark in marks])
            rendered = self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False
            )
        except Exception:
            # Of any kind: rendering the row by itself tells what is wrong with it, if anything is.
            return None
        frame = text.replace("%", "%%")
        at = 0
        for mark in marks:
            # Each once, in the order of the turns.
            if frame.count(mark) != 1 or frame.index(mark) < at:
                return None
            at = frame.index(mark)
            frame = frame.replace(mark, "%s")
        # Another version of the transformers library may give the template other variables.
        return frame if frame % tuple(contents) == rendered else None

    def _rendered(self, roles: Sequence[str], contents: Sequence[_Content]) -> str:
        assert self._template is not None
        return self._template.render(
            messages=[
                {"role": role, "content": content}
                for role, content in zip(roles, contents, strict=True)
            ],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **self._tokenizer.special_tokens_map,
        )


def _strict_template(tokenizer: Any) -> jinja2.Template | None:
    """The chat template in an environment in which looking at a content raises; None: unsure."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils import chat_template_utils

    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    source = getattr(tokenizer, "chat_template", None)
    own = getattr(type(tokenizer), "apply_chat_template", None)
    if (
        compile_template is None
        or not isinstance(source, str)
        or own is not PreTrainedTokenizerBase.apply_chat_template
    ):
        return None
    try:
        given = compile_template(source).environment
        environment = given.overlay()
        tree = environment.parse(source)
        if not all(map(_is_strict, tree.find_all(nodes.Node))):
            return None
        called = [given.globals[name] for name in _CALLED]
        # A template may name others, as long as it does not come to them.
        environment.filters = dict.fromkeys(given.filters, _looked_at)
        environment.filters |= {"trim": _trimmed, "length": len}
        environment.tests = dict.fromkeys(given.tests, _looked_at)
        environment.tests |= {name: given.tests[name] for name in _TESTS}
        environment.getitem = lambda value, key: (
            _looked_at() if isinstance(key, _Unknown) else given.getitem(value, key)
        )
        environment.is_safe_callable = lambda one: any(one is other for other in called)
        template: jinja2.Template = environment.from_string(source)
    except (jinja2.TemplateError, LookupError):
        return None
    return template


def _is_strict(node: nodes.Node) -> bool:
    """Whether nothing looks at a content here without asking it."""
    if isinstance(node, nodes.Compare) and any(one.op in ("in", "notin") for one in node.ops):
        # A text searches itself for another one.
        return len(node.ops) == 1 and (
            isinstance(node.expr, nodes.Const)
            or isinstance(node.ops[0].expr, nodes.List | nodes.Tuple)
        )
    if isinstance(node, nodes.Mod):
        return isinstance(node.right, nodes.Const)
    return type(node) in _NODES


def _trimmed(value: Any) -> str:
    """Jinja's filter trim of white space, which leaves a content as it is; see `_Content`."""
    if type(value) is _Content:
        return value
    if isinstance(value, _Unknown):
        raise _LookedAt
    return filters.do_trim(value)
