"""What `rolemesh check` looks at: a recipe as a run would find it, without loading a model.

The data, one rendered prompt, one judged row and the user's code come from a process of the
services (`rolemesh.services.preview`), which has a tokenizer. Everything else is of the recipe.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import psutil

from rolemesh.coordinator.algorithms.registry import roles_in, unused_roles
from rolemesh.coordinator.commands.findings.data_findings import told_findings
from rolemesh.coordinator.commands.findings.findings import Finding, Level, enough, fail, ok, warn
from rolemesh.coordinator.commands.findings.placing import start_cautions
from rolemesh.coordinator.recipe.algorithm.algorithms import CustomSpec
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.service_flags import named_variables
from rolemesh.coordinator.run.checks.cautions import cautions
from rolemesh.coordinator.run.checks.footprint import footprint_of, free_bytes, gib
from rolemesh.coordinator.run.checks.model_folders import model_folders
from rolemesh.coordinator.run.checks.planning import plan_step
from rolemesh.coordinator.run.checks.start_checks import check_start, services_in
from rolemesh.coordinator.run.folders.folder import RUNS_FOLDER
from rolemesh.coordinator.run.reporting.records import check_directory_is_free
from rolemesh.coordinator.run.results.evaluation import can_evaluate
from rolemesh.coordinator.run.services.host_gpus import HostGpus
from rolemesh.coordinator.state.child_environment import child_environment
from rolemesh.engine.messages import said_last
from rolemesh.engine.specs import (
    OutsideRewardSpec,
    WeightedRewardSpec,
    named_sources,
)
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY

_GIVEN = {
    "sft": "demonstration",
    "dpo": "preference",
    "kto": "judgement",
    "reward_model": "preference",
    "external": "any",
}
"""What an algorithm reads of a row; every other one samples for its prompt."""

_ANSWER_MARGIN_S = 2.0
"""Seconds that are left of the time limit when a reward's answer is no longer waited for."""

_LONGER_S = 60.0
"""The time limit that is advised where the given one was too short, in seconds, at least."""


async def recipe_findings(
    recipe: Recipe, timeout_s: float, gpus: HostGpus
) -> AsyncIterator[Finding]:
    """Looks at a recipe; every finding says what to change.

    Args:
        recipe: The recipe.
        timeout_s: Longest time for data, rewards and the user's code, in seconds; while rows of
            the data are read it does not pass.
        gpus: Of this host.

    Yields:
        Findings, each as soon as it is known.
    """
    try:
        services = services_in(recipe)
        own = [name for name, address in services.items() if address is None]
        check_start(recipe, own)
        if recipe.run.directory is not None:
            check_directory_is_free(recipe.run.directory)
    except ValueError as error:
        yield fail("recipe", str(error))
        # A graph may lack a section too, but data cannot be read without their files.
        yield await _graph(recipe)
        return
    yield ok("recipe", f"{recipe.run.name}: valid, and its files are there")
    yield await _graph(recipe)
    for role in unused_roles(recipe):
        yield warn(
            "recipe",
            f"the section {role} is not used by algorithm {recipe.algorithm.type!r}",
            f"take the section {role} out, or take another algorithm",
        )
    counts: dict[str, Any] = {}
    async for finding in _preview(recipe, services, timeout_s, counts):
        yield finding
    for caution in cautions(recipe, counts.get("train"), counts.get("held_out")):
        yield warn("sizes", caution.text, caution.remedy)
    for caution in start_cautions(recipe, gpus, services):
        yield warn("gpu", caution.text, caution.remedy)
    for finding in (*_evaluation(recipe, counts), *_sizes(recipe, services)):
        yield finding


async def _graph(recipe: Recipe) -> Finding:
    try:
        nodes = await plan_step(recipe)
    except ValueError as error:
        return fail("algorithm", str(error))
    calls = " -> ".join(node.name for node in nodes)
    return ok("algorithm", f"{recipe.algorithm.type}: {calls or 'a client makes the steps'}")


async def _preview(
    recipe: Recipe, services: Mapping[str, str | None], timeout_s: float, counts: dict[str, Any]
) -> AsyncIterator[Finding]:
    """Asks the process that reads data; what it counts goes into `counts`."""
    spec = _preview_spec(recipe, services, timeout_s)
    if spec is None:
        return
    named = [name for role in recipe.roles for name in named_variables(recipe, role)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "rolemesh.services.preview"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 22,
        # The current directory must not shadow a package.
        env={**child_environment(os.environ, named), "PYTHONSAFEPATH": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    is_whole = False
    left = _previewed(recipe, spec, _rewards(recipe, services))
    try:
        async with asyncio.timeout(timeout_s) as limit:
            process.stdin.write(json.dumps(spec).encode())
            process.stdin.close()
            async for line in process.stdout:
                told = json.loads(line)
                if told["type"] == "reading":
                    # Rows come in, many of them: that is no silence.
                    limit.reschedule(asyncio.get_running_loop().time() + timeout_s)
                if told["type"] == "data":
                    counts.update(told)
                left = _left(left, told)
                for finding in told_findings(recipe, services, told):
                    yield finding
            await process.wait()
            is_whole = True
    except TimeoutError:
        longer_s = max(_LONGER_S, 4 * timeout_s)
        for what in left:
            yield Finding(
                level=Level.SKIP,
                what=what,
                text=f"not looked at within {timeout_s:g} s; give --timeout {longer_s:g}",
            )
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if is_whole and process.returncode:
        last = said_last((await errors).decode(errors="replace"))
        yield fail("data", f"the process that reads the data failed: {last}")


def _rewards(recipe: Recipe, services: Mapping[str, str | None]) -> list[WeightedRewardSpec]:
    sections = [getattr(recipe, role) for role in ("reward", "cost") if role in services]
    return [one for section in sections for one in named_sources(section.source)]


def _previewed(
    recipe: Recipe, spec: Mapping[str, Any], rewards: Sequence[WeightedRewardSpec]
) -> tuple[str, ...]:
    """What depends on the process, in the order in which it tells of it."""
    is_evaluated = recipe.run.evaluation.num_prompts and can_evaluate(recipe, roles_in(recipe))
    outside = any(isinstance(one.source, OutsideRewardSpec) for one in rewards)
    checks = {
        "models": bool(spec["models"]),
        "data": True,
        "evaluation": is_evaluated,
        "prompt": True,
        "lengths": spec["max_model_len"] is not None,
        "teachers": spec["route"] is not None,
        "environment": spec["environment"] is not None,
        "reward": outside,
        "own functions": bool(spec["own_functions"]),
    }
    return tuple(what for what, is_made in checks.items() if is_made)


def _left(checks: tuple[str, ...], told: Mapping[str, Any]) -> tuple[str, ...]:
    """The checks that come behind what the process has told now."""
    kind = told["what"] if told["type"] == "error" else told["type"]
    # The number of held-out rows is in what it tells of the data.
    told_of = {"data": ("data", "evaluation"), "functions": ("own functions",)}.get(kind, (kind,))
    ended = max((at for at, what in enumerate(checks) if what in told_of), default=-1)
    return checks[ended + 1 :]


def _preview_spec(
    recipe: Recipe, services: Mapping[str, str | None], timeout_s: float
) -> dict[str, Any] | None:
    """What the process is to look at; None where no role of the run reads data."""
    reader = "actor" if "actor" in services else "reward"
    section: Any = recipe.section(reader)
    data = getattr(section, "data", None)
    if data is None:
        return None
    sampler, sampling = recipe.sampler, recipe.sampling
    model = section.model if reader == "actor" else section.source.model
    kind = recipe.algorithm.type
    given = _GIVEN.get(kind, "prompt" if not isinstance(recipe.algorithm, CustomSpec) else "any")
    environment = getattr(
        section if recipe.rollout is None else recipe.rollout, "environment", None
    )
    own = {role_of(name) for name, address in services.items() if address is None}
    return {
        "models": [
            {"field": one.field, "path": str(one.path), "has_tokenizer": one.has_tokenizer}
            for one in model_folders(recipe, sorted(own))
        ],
        "model": str(model.path),
        "data": data.model_dump(mode="json"),
        "seed": recipe.run.seed,
        "given": given,
        "max_model_len": sampler.max_model_len if sampler and sampling else None,
        "max_new_tokens": sampling.max_new_tokens if sampling else None,
        "environment": None if environment is None else environment.model_dump(mode="json"),
        "route": None
        if recipe.teacher is None or recipe.teacher.route is None
        else recipe.teacher.route.model_dump(mode="json"),
        "rewards": [one.model_dump(mode="json") for one in _rewards(recipe, services)],
        "reward_timeout_s": max(1.0, timeout_s / 2 - _ANSWER_MARGIN_S),
        "own_functions": {
            field: one.model_dump(mode="json") for field, one in recipe.own_functions().items()
        },
    }


def _evaluation(recipe: Recipe, counts: Mapping[str, Any]) -> Iterator[Finding]:
    wanted, have = recipe.run.evaluation.num_prompts, counts.get("held_out")
    if have is None or not can_evaluate(recipe, roles_in(recipe)) or wanted <= have:
        return
    yield fail(
        "evaluation",
        f"run.evaluation.num_prompts is {wanted}, but {have} prompts are held out: the run does "
        "not start",
        f"set run.evaluation.num_prompts to {have} at most (0 switches evaluation off), or hold "
        "out more prompts",
    )


def _sizes(recipe: Recipe, services: Mapping[str, str | None]) -> Iterator[Finding]:
    """Memory and disk, as far as they follow from the sizes of models."""
    found = footprint_of(recipe, services)
    for folder in found.unknown:
        yield warn(
            "memory",
            f"{folder} holds no *.safetensors that can be read here, so memory and disk do not "
            "count this model",
            "run the check where the model is",
        )
    if found.memory:
        parts = ", ".join(f"{name} {gib(size)}" for name, size in found.memory.items())
        needed = sum(found.memory.values()) + found.cuts
        yield _against(
            "memory",
            f"about {gib(needed)}: {parts}, shared memory {gib(found.cuts)}; an estimate of "
            "weights, gradients, optimizer, KV cache and libraries, without activations",
            needed,
            psutil.virtual_memory().available,
            "free",
            "take a smaller model, lower rollout.kv_cache_gib, or set run.recovery.cuts to false",
        )
    for name, size in found.device_memory.items():
        yield ok(
            "gpu memory",
            f"{name}: about {gib(size)} on each GPU; an estimate of weights, gradients and "
            "optimizer, without sampler and activations",
        )
    if found.cuts and SHM_DIRECTORY.is_dir():
        yield _against(
            "shared memory",
            f"about {gib(found.cuts)} in {SHM_DIRECTORY} for the cuts that recovery goes back to, "
            "beside the experience of a step",
            found.cuts,
            shutil.disk_usage(SHM_DIRECTORY).free,
            "free there",
            "make it larger, or set run.recovery.cuts to false",
        )
    if found.disk:
        runs = (recipe.run.directory or RUNS_FOLDER).absolute()
        yield _against(
            "disk",
            f"{found.disk_in(runs)}; an estimate from the sizes of the models",
            found.disk,
            free_bytes(runs),
            "free there",
            "take another folder with --out, or lower run.checkpoint.keep",
        )


def _against(what: str, text: str, needed: int, available: int, noun: str, remedy: str) -> Finding:
    """A finding about bytes that are needed, of which some are available."""
    return enough(needed <= available, what, f"{text}; {noun} are {gib(available)}", remedy)
