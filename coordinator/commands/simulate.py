"""`rolemesh simulate`: a recipe's run in virtual time, with losses and slow services."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rolemesh.coordinator.commands.recipes.cluster_options import (
    Calibrations,
    CompletionTokens,
    Gpu,
    Gpus,
    Network,
    PerMachine,
    PromptTokens,
    basis_of,
    groups_of,
    planned_job,
)
from rolemesh.coordinator.commands.terminal.console import say
from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, EXIT_FAILED, fail
from rolemesh.coordinator.commands.terminal.options import Json, Overrides, Recipes
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.loop.collector import collect_seldom
from rolemesh.coordinator.mapping.errors import PlanError
from rolemesh.coordinator.mapping.job.job import Wishes
from rolemesh.coordinator.mapping.job.templates import templates
from rolemesh.coordinator.mapping.report.report import plan_of
from rolemesh.coordinator.mapping.search.search import Search
from rolemesh.coordinator.mapping.search.shortage import shortage
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_files import with_files
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.model_sizes import models_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.tuning.calibrations import calibrations_for
from rolemesh.coordinator.simulation.faults import Faults
from rolemesh.coordinator.simulation.page import Simulated, notes, rows
from rolemesh.coordinator.simulation.planned import simulated_recipe, timing_of
from rolemesh.coordinator.simulation.run import simulate
from rolemesh.coordinator.simulation.timing import RowLengths, Settings

app = typer.Typer(add_completion=False)


@app.command("simulate")
def simulate_command(
    recipe: Recipes,
    gpus: Gpus,
    gpu: Gpu,
    per_machine: PerMachine = None,
    network: Network = None,
    prompt_tokens: PromptTokens = None,
    completion_tokens: CompletionTokens = None,
    steps: Annotated[int, typer.Option(min=2, max=10_000, help="Steps to make.")] = 10,
    samplers: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Rollout services; as many as the plan's replicas."),
    ] = None,
    losses: Annotated[
        int, typer.Option(min=0, max=1000, help="Processes that end, at random times.")
    ] = 0,
    start_s: Annotated[
        float, typer.Option("--start-s", min=0.0, help="Seconds in which a process starts anew.")
    ] = 60.0,
    stragglers: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of services that are slow in a step.")
    ] = 0.0,
    slow_by: Annotated[
        float, typer.Option(min=1.0, help="How many times as long a slow one takes.")
    ] = 2.0,
    seed: Annotated[int, typer.Option(help="Of lengths, losses and slow services.")] = 0,
    schedules: Annotated[
        bool, typer.Option("--schedules", help="Compares who could sample, and when.")
    ] = False,
    calibration: Calibrations = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Plans a recipe and makes its run in virtual time: the real coordinator, simulated services.

    Seconds of calls are those of `rolemesh plan`; the run itself (what waits for what, losses,
    recovery) is made by the code that makes real ones. No device is needed, and the same seed gives
    the same output. Exit code 0: done; 1: nothing fits, or the run failed; 2: bad input.

    Example: rolemesh simulate my-recipe.yaml --gpus 64 --gpu h100 --losses 5 --schedules
    """
    collect_seldom()
    try:
        measured = calibrations_for(gpu, calibration or ())
        groups = groups_of(gpus, gpu, per_machine, network, measured)
        loaded = load_recipe(recipe, overrides=overrides or (), environment=os.environ)
        loaded = with_files(loaded, weights=False)
        variants = list(templates(loaded)) if schedules else [("as the recipe says", loaded)]
        if not variants:
            raise RecipeError(
                f"algorithm {loaded.algorithm.type!r} has no other schedules: leave --schedules out"
            )
        found = []
        for name, variant in variants:
            has_samplers = samplers is not None and variant.rollout is not None
            wishes = _samplers_apart(variant) if has_samplers else None
            job = planned_job(variant, groups, prompt_tokens, completion_tokens, wishes=wishes)
            search = Search(job, groups)
            placed = search.run(kept=1)
            if not placed.placements:
                if schedules:
                    continue
                fail(shortage(search), EXIT_FAILED, as_json=as_json)
            plan = replace(plan_of(search, placed), basis=basis_of(gpu, measured))
            made = simulated_recipe(
                variant,
                plan,
                steps=steps,
                num_samplers=samplers if has_samplers or not schedules else None,
            )
            settings = Settings(
                timing=timing_of(search, plan),
                lengths=RowLengths(job.work.completions, seed),
                prompt_tokens=job.work.prompt_tokens,
                start_s=start_s,
                faults=Faults(
                    seed=seed,
                    losses=losses,
                    within_s=steps * plan.period,
                    stragglers=stragglers,
                    slow_by=slow_by,
                ),
            )
            outcome = simulate(made, settings)
            found.append(Simulated(name=name, plan=plan, recipe=made, outcome=outcome))
    except (RecipeError, PlanError) as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    except RunError as error:
        fail(f"the simulated run failed: {error}", EXIT_FAILED, as_json=as_json)
    if not found:
        text = "no schedule fits these devices: see `rolemesh plan`"
        fail(text, EXIT_FAILED, as_json=as_json)
    if as_json:
        print(json.dumps({"seed": seed, "simulated": [one.to_dict() for one in found]}))
        return
    _show(found, steps, seed)


def _samplers_apart(recipe: Recipe) -> Wishes:
    """Services of a role need devices of their own."""
    others = [role for role, models in models_of(recipe).items() if models and role != "rollout"]
    return Wishes(apart=tuple(("rollout", role) for role in others))


def _show(found: list[Simulated], steps: int, seed: int) -> None:
    console = Console()
    heading, *others = rows(found)
    table = Table(title=f"{steps} simulated steps, seed {seed}")
    for number, text in enumerate(heading):
        table.add_column(text, justify="right" if number else "left")
    for other in others:
        table.add_row(*other)
    console.print(table)
    say(console, *notes(found))
