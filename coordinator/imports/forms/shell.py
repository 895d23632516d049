"""Command lines in shell scripts, read without a shell: variables, sums, continued lines.

Nothing is run. What only a shell could know stays as it is, and is marked as unresolved.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from rolemesh.coordinator.imports.source import ImportedError, Unresolved

_ASSIGNMENT = re.compile(r"^(?:export\s+|declare\s+-\w+\s+|local\s+|readonly\s+)?(\w+)=(.*)$", re.S)
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-((?:[^{}]|\$\{[^{}]*\})*))?\}|\$(\w+)")
_ARRAY_SET = re.compile(r"^(?:export\s+|declare\s+-a\s+)?(\w+)(\+?)=\((.*)\)\s*(#.*)?$", re.S)
_ARRAY = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
_PASSED_ON = re.compile(r"\"?\$(?:@|\*|\{@[^}]*\})\"?")
"""What a script was called with."""
_SUM = re.compile(r"\$\(\(((?:[^()$`\"']|\((?:[^()$`\"']|\([^()$`\"']*\))*\))*)\)\)")
_MARK = "\0"
"""Stands for a dollar that could not be resolved, so that it is not tried again."""
_BEGINS = re.compile(r"^(if|for|while|until|case|function)\b|^\w+\s*\(\)\s*\{?$")
_ENDS = re.compile(r"^(fi|done|esac|\})\b|^\}$")
_REDIRECTION = re.compile(r"^\d?(>>?|<|>&)|^\d?>&\d$|^&$")
_STOPS = ("|", "||", "&&", ";", "&")
MAX_BYTES = 2**20


def words_of(text: str, program: str) -> tuple[list[str], list[str]]:
    """The arguments of a program in a script.

    Args:
        text: The script, or one command line.
        program: What the command names: "main_ppo" or "train_ppo_ray".

    Returns:
        Arguments, where unresolved ones are Unresolved; and remarks for people.

    Raises:
        ImportedError: The script does not call the program, or quotes do not end.
    """
    script = _Script()
    for line in _lines(text):
        words = script.read(line, program)
        if words is not None:
            return words, script.remarks
    raise ImportedError(
        f"no command of the script calls {program}: give the script that does, or its arguments"
    )


def split(text: str) -> list[str]:
    """The words of one command line; raises ImportedError where quotes do not end."""
    try:
        return [_plain(word) for word in shlex.split(text, comments=True)]
    except ValueError as error:
        shown = " ".join(text.split())[:60]
        raise ImportedError(f"{shown!r}: not a command line ({error}): close the quotes") from None


def _plain(word: str) -> str:
    return Unresolved(word.replace(_MARK, "$")) if _MARK in word or "$" in word else word


def _lines(text: str) -> list[str]:
    """Logical lines: continued ones, and those within an array or a quote, are one."""
    logical: list[str] = []
    current, quote = "", ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") and (not current or current.endswith("\n")):
            continue
        if line.rstrip().endswith("\\"):
            current += line.rstrip()[:-1] + " "
            quote = _quote_after(quote, line.rstrip()[:-1])
            continue
        current += line
        quote = _quote_after(quote, line)
        opened = re.match(r"^\s*(?:export\s+)?\w+\+?=\(", current)
        if (opened and not re.search(r"\)\s*(#.*)?$", current)) or quote:
            current += "\n"
            continue
        logical.append(current.strip())
        current, quote = "", ""
    return [*logical, current.strip()]


def _quote_after(quote: str, line: str) -> str:
    """The quote that is open at the end of a line, if one is.

    Args:
        quote: The one that is open at its beginning; empty for none.
        line: The line.
    """
    is_escaped = False
    before = " "
    for char in line:
        if is_escaped:
            is_escaped = False
        elif char == "\\" and quote != "'":
            is_escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#" and before.isspace():
            break
        before = char
    return quote


class _Script:
    def __init__(self) -> None:
        self.values: dict[str, str] = {"HOME": str(Path.home())}
        self.arrays: dict[str, str] = {}
        self.remarks: list[str] = []
        self._depth = 0
        self._conditional: set[str] = set()

    def read(self, line: str, program: str) -> list[str] | None:
        """Takes a line in; the arguments where it calls the program."""
        if re.search(rf"\b(?:{program})\b", line) and not line.startswith(("echo", "pkill", "pip")):
            return self._arguments(line, program)
        if _BEGINS.match(line) and not re.search(r"\b(fi|done|esac)\s*;?$|\}$", line):
            self._depth += 1
        elif _ENDS.match(line):
            self._depth = max(0, self._depth - 1)
        array = re.match(
            r"^(?:export\s+|declare\s+-a\s+)?(\w+)(\+?)=\((.*)\)\s*(#.*)?$", line, re.S
        )
        if array is not None:
            inner = "\n".join(
                one for one in array[3].split("\n") if not one.lstrip().startswith("#")
            )
            before = self.arrays.get(array[1], "") if array[2] else ""
            self.arrays[array[1]] = f"{before} {inner}"
            return None
        # Several assignments may stand in one line.
        for part in line.split(";") if "$(" not in line else [line]:
            found = _ASSIGNMENT.match(part.strip())
            if found is not None:
                self._assign(found[1], found[2])
        return None

    def _assign(self, name: str, text: str) -> None:
        if self._depth:
            self._conditional.add(name)
            return
        if "$(" in text.replace("$((", "") or "`" in text:
            # What a command prints is not known.
            self.values.pop(name, None)
            return
        try:
            words = shlex.split(self._expanded(text), comments=True)
        except ValueError:
            words = []
        self.values[name] = words[0] if words else ""

    def _arguments(self, line: str, program: str) -> list[str]:
        for _ in range(3):
            line = _ARRAY.sub(lambda found: self.arrays.get(found[1], ""), line)
        line = _PASSED_ON.sub("", line)
        line = self._expanded(line)
        words = split(line)
        starts = [n for n, word in enumerate(words) if re.search(rf"\b(?:{program})(\.py)?$", word)]
        if not starts and len(words) > 1:
            # The command is one quoted argument of another one, e.g. of srun's bash -c.
            inner = next((word for word in words if re.search(program, word)), "")
            return self._arguments(inner, program) if inner != line else words
        taken: list[str] = []
        for word in words[starts[0] + 1 if starts else 0 :]:
            if word in _STOPS or _REDIRECTION.match(word):
                break
            if word.strip():
                taken.append(word)
        for name in sorted(self._conditional):
            if re.search(rf"\b{name}\b", line) or name in self.values:
                self.remarks.append(
                    f"{name} is also set under a condition of the script, which is not read"
                )
        return taken

    def _expanded(self, text: str) -> str:
        """Variables and sums in a text, but for those in single quotes."""
        parts = re.split(r"('[^']*')", text)
        quoted = False
        for number, part in enumerate(parts):
            # Single quotes within double ones are characters.
            if number % 2 == 0 or quoted:
                parts[number] = self._resolved(part)
            quoted ^= len(re.findall(r'(?<!\\)"', part)) % 2 == 1 if number % 2 == 0 else False
        return "".join(parts)

    def _resolved(self, text: str) -> str:
        for _ in range(8):
            new = _VARIABLE.sub(self._value, text)
            new = _SUM.sub(self._sum, new)
            if new == text:
                break
            text = new
        # A command's output is not known.
        return text.replace("$(", f"{_MARK}(")

    def _value(self, found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        if name in self.values and (self.values[name] or default is None):
            return self.values[name]
        if default is not None:
            return default.strip("\"'")
        return f"{_MARK}{{{name}}}"

    def _sum(self, found: re.Match[str]) -> str:
        named = re.sub(r"\b[A-Za-z_]\w*\b", lambda n: self.values.get(n[0], n[0]), found[1])
        value = arithmetic(named)
        return f"{_MARK}(({found[1]}))" if value is None else str(value)


def arithmetic(text: str) -> int | None:
    """The value of a shell's sum of whole numbers; None where it is none."""
    tokens = re.findall(r"\d+|[-+*/%()]", text)
    if "".join(tokens) != "".join(text.split()) or len(tokens) > 200:
        return None
    try:
        value, rest = _term(tokens, 0)
    except (IndexError, ValueError, ZeroDivisionError, RecursionError):
        return None
    return value if not rest else None


def _term(tokens: list[str], level: int) -> tuple[int, list[str]]:
    """Sums of products of numbers and brackets, from the left."""
    if level == 2:
        first, *rest = tokens
        if first == "(":
            value, rest = _term(rest, 0)
            if rest[0] != ")":
                raise ValueError
            return value, rest[1:]
        if first == "-":
            value, rest = _term(rest, 2)
            return -value, rest
        return int(first), rest
    value, rest = _term(tokens, level + 1)
    while rest and rest[0] in ("+-", "*/%")[level]:
        sign, *rest = rest
        other, rest = _term(rest, level + 1)
        value = _applied(sign, value, other)
    return value, rest


def _applied(sign: str, one: int, other: int) -> int:
    match sign:
        case "+":
            return one + other
        case "-":
            return one - other
        case "*":
            return one * other
        case "/":
            return int(one / other)
        case _:
            return one % other


def read_text(path: Path, field: str) -> str:
    """A file of text, of 1 MiB at most; raises ImportedError where it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ImportedError(
            f"{field} {path}: there is no such file: give one that exists"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ImportedError(f"{field} {path}: cannot be read ({error}): give a text file") from None
    if len(text) > MAX_BYTES:
        raise ImportedError(f"{field} {path}: has more than 1 MiB: give the settings alone")
    return text
