"""`rolemesh fit`: what each GPU of a recipe holds, before there is one."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rolemesh.coordinator.commands.findings.placing import load_placed
from rolemesh.coordinator.commands.recipes.memory_question import add_answer, question_of
from rolemesh.coordinator.commands.terminal.console import say
from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, EXIT_FAILED, fail
from rolemesh.coordinator.commands.terminal.options import Json, Overrides, Recipes
from rolemesh.coordinator.commands.terminal.processes import PreviewError, told_by
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_files import with_files
from rolemesh.coordinator.run.checks.pool_memory import PoolFound, RoleFound, pool_memory
from rolemesh.coordinator.run.services.host_gpus import GPU_BYTES, HostGpus, host_gpus

app = typer.Typer(add_completion=False)

_HEADINGS = {
    "weights": "weights",
    "gradients": "grads",
    "optimizer": "optim.",
    "activations": "activ.",
    "head": "head",
    "gathers": "gathers",
}
"""By what bytes are for; short, so that a table fits into 80 columns."""

_GIB = 2**30


@app.command()
def fit(
    recipe: Recipes,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME|GB", help=f"{', '.join(GPU_BYTES)}, or memory in 10^9 bytes."),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="GPUs; needed with --gpu.")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Estimates what each GPU of a recipe holds, and says what to change where it does not fit.

    The services' own trainer makes an update on tensors without values, so that nothing but the
    config.json of each model is needed; it takes a minute or more for a large one. Without --gpu
    the GPUs of this host count. Exit code 0: it fits; 1: it does not; 2: bad input.
    """
    try:
        gpus = _gpus(gpu, count)
        loaded = load_placed(recipe, gpus, overrides=overrides or (), environment=os.environ)
        loaded = with_files(loaded, weights=False)
        pools = [name for name, pool in loaded.pools.items() if set(pool.devices) != {"cpu"}]
        if not pools:
            raise RecipeError(
                "every pool of the recipe names devices [cpu]: leave pools out, or name GPUs, e.g. "
                "--set \"pools.<name>.devices=['cuda:0']\""
            )
        named = {device for name in pools for device in loaded.pools[name].devices}
        if len(named) > gpus.count:
            raise RecipeError(
                f"the recipe's pools name {len(named)} GPUs, but there are {gpus.count}: give "
                f"--count {len(named)}, or fewer devices"
            )
    except RecipeError as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    found: dict[str, RoleFound] = {}
    on_gpus = {role for name in pools for role in loaded.pools[name].roles}
    question: dict[str, Any] = {
        kind: [one for one in asking if one["role"] in on_gpus]
        for kind, asking in question_of(loaded).items()
    }
    question["device_bytes"] = gpus.bytes_each
    try:
        answers = told_by(
            "rolemesh.services.preview.memory",
            work="estimates memory",
            # Nothing is computed on a device.
            environment={"CUDA_VISIBLE_DEVICES": ""},
            question=json.dumps(question),
        )
        for answer in answers:
            if answer["type"] == "error":
                raise RecipeError(f"{answer['role']}: {answer['text']}")
            add_answer(found, loaded, answer)
    except RecipeError as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    except PreviewError as error:
        fail(str(error), EXIT_FAILED, as_json=as_json)
    results = [pool_memory(loaded, name, found, gpus.bytes_each) for name in pools]
    if as_json:
        told = {
            "gpu": dataclasses.asdict(gpus),
            "roles": {role: dataclasses.asdict(one) for role, one in found.items()},
            "pools": [result.to_dict() for result in results],
        }
        print(json.dumps(told))
    else:
        _show(Console(), gpus, found, results)
    if any(result.headroom < 0 for result in results):
        raise typer.Exit(EXIT_FAILED)


def _gpus(gpu: str | None, count: int | None) -> HostGpus:
    """The GPUs that are asked about."""
    if gpu is None:
        here = host_gpus()
        if not here.count:
            raise RecipeError(
                "this host has no GPU that services could use"
                + (f" ({here.unusable})" if here.unusable else "")
                + ": give --gpu and --count"
            )
        return here if count is None else dataclasses.replace(here, count=count)
    if count is None:
        raise RecipeError(f"--gpu is {gpu!r}, but --count is missing: say how many there are")
    if gpu in GPU_BYTES:
        return HostGpus(count=count, name=gpu, bytes_each=GPU_BYTES[gpu])
    try:
        gigabytes = float(gpu)
    except ValueError:
        gigabytes = 0.0
    if gigabytes <= 0:
        raise RecipeError(
            f"--gpu is {gpu!r}: give one of {', '.join(GPU_BYTES)}, or its memory in 10^9 bytes"
        )
    return HostGpus(count=count, name=f"{gigabytes:g} GB", bytes_each=int(gigabytes * 10**9))


def _show(
    console: Console, gpus: HostGpus, found: dict[str, RoleFound], pools: Sequence[PoolFound]
) -> None:
    table = Table(title=f"GiB on each GPU, at each role's peak ({gpus.count} x {gpus.name})")
    for heading in ("role", *_HEADINGS.values(), "peak", "rest", "sampler"):
        table.add_column(heading, justify="left" if heading == "role" else "right")
    for role, one in found.items():
        parts = [_gib(one.at_peak.get(purpose, 0)) for purpose in _HEADINGS]
        least = _gib(one.sampler["least"]) if one.sampler else "-"
        table.add_row(role, *parts, _gib(one.peak), _gib(one.rest), least)
    console.print(table)
    console.print(
        "rest: between calls, awake; sampler: the least that vLLM starts with", highlight=False
    )
    for pool in pools:
        _show_pool(console, pool)
    sys.stdout.flush()


def _show_pool(console: Console, pool: PoolFound) -> None:
    table = Table(title=f"pools.{pool.pool}: GiB on each of its GPUs, of {_gib(pool.gpu_bytes)}")
    for heading in ("while", "held by", "in all", "left"):
        table.add_column(heading, justify="left" if heading in ("while", "held by") else "right")
    for moment in pool.moments:
        held = ", ".join(f"{name} {_gib(size)}" for name, size in moment.held.items())
        table.add_row(moment.what, held, _gib(moment.total), _gib(pool.gpu_bytes - moment.total))
    console.print(table)
    share = pool.headroom / pool.gpu_bytes
    if pool.headroom < 0:
        verdict = f"does not fit: {_gib(-pool.headroom)} GiB too much while {pool.worst.what}"
    else:
        verdict = f"fits, with {share:.0%} to spare while {pool.worst.what}"
        verdict += " (less than 10% is tight)" if pool.is_tight else ""
    say(console, f"pools.{pool.pool} {verdict}", *(f"  -> {line}" for line in pool.advice))


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f}"
