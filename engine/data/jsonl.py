"""Prompts from JSON lines: one object a line, with `prompt` and, optionally, `answer`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rolemesh.engine.data.prompts import Message, PromptRow
from rolemesh.engine.specs import JsonlSpec


def load(spec: JsonlSpec) -> tuple[list[PromptRow], list[PromptRow]]:
    """Reads the training file and, when given, the held-out file.

    Raises:
        ValueError: a file is missing, a line is not what it should be (named by its number), or
            a held-out prompt is also a training prompt.
    """
    train = _read(spec.path, "data.path", spec)
    if spec.held_out_path is None:
        return train, []
    held_out = _read(spec.held_out_path, "data.held_out_path", spec)
    seen = {_identity(row) for row in train}
    for number, row in enumerate(held_out, start=1):
        if _identity(row) in seen:
            raise ValueError(
                f"data.held_out_path {spec.held_out_path}: prompt {number} is also a training "
                "prompt; a held-out score over it would mean nothing: take it out of one file"
            )
    return train, held_out


def _identity(row: PromptRow) -> str:
    return json.dumps(list(row.messages), sort_keys=True)


def _read(path: Path, field: str, spec: JsonlSpec) -> list[PromptRow]:
    try:
        # Not splitlines: it also cuts at separators that JSON strings may hold.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"{field} {path} cannot be read ({error.strerror}): check it") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{field} {path}, line {number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
        if not isinstance(record, dict) or "prompt" not in record:
            raise ValueError(f"{where}: needs an object with the key 'prompt'")
        rows.append(
            PromptRow(
                messages=_messages(record["prompt"], where, spec.system_prompt),
                assistant_prefix=spec.assistant_prefix,
                answer=_answer(record.get("answer"), where),
                metadata=json.dumps(record),
            )
        )
    return rows


def _answer(answer: Any, where: str) -> str:
    if answer is None:
        return ""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"{where}: 'answer' must be text or a number")
    return str(answer)


def _messages(prompt: Any, where: str, system_prompt: str | None) -> list[Message]:
    if isinstance(prompt, str):
        system: list[Message] = (
            [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        )
        return [*system, {"role": "user", "content": prompt}]
    if (
        isinstance(prompt, list)
        and prompt
        and all(
            isinstance(turn, dict)
            and isinstance(turn.get("role"), str)
            and isinstance(turn.get("content"), str)
            for turn in prompt
        )
    ):
        return prompt
    raise ValueError(
        f"{where}: 'prompt' must be text or a list of turns with the keys role and content"
    )
