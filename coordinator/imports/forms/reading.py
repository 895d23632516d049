"""Reads the files and command lines of other systems as one flat mapping each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rolemesh.coordinator.imports.forms.hydra import flat, interpolated, overridden
from rolemesh.coordinator.imports.forms.plain import plain_yaml
from rolemesh.coordinator.imports.forms.shell import read_text, split, words_of
from rolemesh.coordinator.imports.source import ImportedError, Source, Unresolved, known
from rolemesh.coordinator.imports.values.trl_trainers import TRAINERS, trl_trainer

_SCRIPTS = (".sh", ".bash", ".slurm")
_VERL_PROGRAM = r"main_ppo|main_dapo|main_\w+|fully_async_main"
_VERL_FILES = ("ppo_trainer", "ppo_megatron_trainer")
_OPENRLHF_PROGRAM = "train_ppo_ray"
_TRL_PROGRAM = rf"(?:{'|'.join(TRAINERS)})\w*"


def read_verl(config: Path, overrides: Sequence[str], options: Mapping[str, int]) -> Source:
    """Settings of verl's main_ppo: a YAML file or a script that calls it, and overrides.

    Raises:
        ImportedError: A file cannot be read, or is none of these.
    """
    text = read_text(config, "CONFIG")
    notes: list[str] = []
    values: dict[str, Any] = {}
    words = list(overrides)
    if config.suffix in _SCRIPTS:
        found, notes = words_of(text, _VERL_PROGRAM)
        words = [*found, *words]
    else:
        values = flat(_mapping(text, "CONFIG", config), f"CONFIG {config}")
    kept, remarks = _without_hydra_flags(words)
    values = overridden(values, kept)
    resolved = interpolated(values, known("verl").defaults)
    return Source("verl", resolved, notes=[*notes, *remarks], options=options)


def _without_hydra_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    kept, remarks = [], []
    waiting = iter(words)
    for word in waiting:
        if isinstance(word, Unresolved) and "=" not in word:
            remarks.append(f"{word} is an argument of the script that is not known here")
        elif not word.startswith("-"):
            kept.append(word)
        else:
            name, equals, value = word.partition("=")
            value = value if equals else next(waiting, "")
            if name == "--config-name" and value.removesuffix(".yaml") not in _VERL_FILES:
                remarks.append(
                    f"{name} {value} is a file of its own, which is not read: print the whole "
                    "configuration with verl's `--cfg job --resolve`, and import that"
                )
    return kept, remarks


def read_openrlhf(arguments: Sequence[str], options: Mapping[str, int]) -> Source:
    """Settings of OpenRLHF's train_ppo_ray: a command line, its flags, or a script.

    Args:
        arguments: One text, which is split as a shell does, or a file with a script; several are
            taken as they are.
        options: See Source.

    Raises:
        ImportedError: It is none of these.
    """
    notes: list[str] = []
    words = list(arguments)
    if len(words) == 1:
        text = words[0]
        if text.strip().endswith(_SCRIPTS):
            text = read_text(Path(text.strip()), "ARGS")
        if "openrlhf.cli." in text and _OPENRLHF_PROGRAM not in text:
            raise ImportedError(
                "ARGS calls another program of OpenRLHF than train_ppo_ray, the only one that is "
                "known: for SFT and DPO see docs/given-answers.md"
            )
        if _OPENRLHF_PROGRAM in text:
            words, notes = words_of(text, _OPENRLHF_PROGRAM)
        else:
            words = split(text.replace("\\\n", " "))
    return Source("openrlhf", _flags(words, "ARGS"), notes=notes, options=options)


def read_trl(config: Path, options: Mapping[str, int]) -> Source:
    """Settings of a trainer of TRL: a file of JSON or YAML, or a script.

    Raises:
        ImportedError: The file cannot be read, or is none of these.
    """
    text = read_text(config, "FILE")
    notes: list[str] = []
    if config.suffix in _SCRIPTS:
        words, notes = words_of(text, _TRL_PROGRAM)
        values = _flags(words, "FILE")
        called = [name for name in TRAINERS if re.search(rf"\b{name}\b", text)]
        if len(called) == 1 and called != ["grpo"]:
            values["trainer"] = called[0]
        if isinstance(values.get("config"), str):
            notes.append(f"--config {values.pop('config')} is not read: import that file")
    else:
        values = _mapping(text, "FILE", config)
    peft = values.pop("peft_config", None)
    if isinstance(peft, Mapping):
        values |= {f"peft_config.{key}": value for key, value in peft.items()}
        values.setdefault("use_peft", True)
    source = Source("trl", values, notes=notes, options=options)
    source.known = known("trl", trl_trainer(source))
    return source


def _mapping(text: str, field: str, path: Path) -> dict[str, Any]:
    try:
        read = json.loads(text) if path.suffix == ".json" else plain_yaml(text)
    except json.JSONDecodeError as error:
        raise ImportedError(
            f"{field} {path}:{error.lineno}:{error.colno}: not valid JSON: {error.msg}"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or error
        raise ImportedError(f"{field} {where}: not valid YAML: {problem}") from None
    if not isinstance(read, dict):
        what = "empty" if read is None else f"a {type(read).__name__}"
        raise ImportedError(
            f"{field} {path}: the settings are a mapping of names to values, this is {what}: give "
            "the configuration of a run"
        )
    return {str(key): value for key, value in read.items()}


def _flags(words: Sequence[str], field: str) -> dict[str, Any]:
    """Flags with their values: none is true, one is that, several are a list."""
    values: dict[str, Any] = {}
    name: str | None = None
    taken: list[str] = []

    def close() -> None:
        if name is not None:
            plain = [word if isinstance(word, Unresolved) else _scalar(word) for word in taken]
            values[name] = True if not plain else plain[0] if len(plain) == 1 else plain

    for word in words:
        if word.startswith("--") and len(word) > 2:
            close()
            flag, equals, value = word[2:].partition("=")
            kind = Unresolved if isinstance(word, Unresolved) else str
            name, taken = flag, [kind(value)] if equals else []
        elif name is None:
            raise ImportedError(
                f"{field}: {word!r} stands before the first flag: give flags, e.g. '--seed 1', or "
                "a command that calls the trainer"
            )
        else:
            taken.append(word)
    close()
    return values


def _scalar(word: str) -> Any:
    """A word as a number or a boolean where it is one."""
    try:
        value = plain_yaml(word)
    except (yaml.YAMLError, ValueError, RecursionError):
        return word
    return value if isinstance(value, bool | int | float) else word
