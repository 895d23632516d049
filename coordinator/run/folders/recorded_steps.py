"""Reader of a run's folder for the cost model: what calls took, in the median over steps."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rolemesh.coordinator.api.reads.plans import WARMUP_STEPS
from rolemesh.coordinator.dataflow.futures import Node, NodeState
from rolemesh.coordinator.mapping.calibration.recorded import RecordedRun
from rolemesh.coordinator.mapping.job.from_recipe import job_of, one_call_a_role, work_of
from rolemesh.coordinator.mapping.job.tasks import Timeline
from rolemesh.coordinator.mapping.job.work import Work
from rolemesh.coordinator.mapping.search.placed import own_layouts
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_files import with_files
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.schedule import SyncSamplerSpec
from rolemesh.coordinator.recipe.sections.tuning import with_settings
from rolemesh.coordinator.run.folders.folder import NoRunError, read_graphs
from rolemesh.coordinator.run.saving.resume import CONFIG_FILE
from rolemesh.coordinator.run.saving.turns import read_turns
from rolemesh.coordinator.trackers.files import METRICS_FILE, whole_lines


def recorded_run(directory: Path, clock: Callable[[float], float] = float) -> RecordedRun:
    """Reads what the steps of a run took; of one that tuned itself, those with the last settings.

    Args:
        directory: Folder of the run, with the recipe that it was made by.
        clock: Takes Unix times, and gives those that count.

    Raises:
        NoRunError: There is no such run, it has too few steps, or its recipe is none.
        RecipeError: Its calls cannot be told apart, or its step cannot be planned.
    """
    config = directory / CONFIG_FILE
    if not config.is_file():
        raise NoRunError(f"{directory} has no {CONFIG_FILE}: name the folder of a run")
    recipe, turns = with_files(load_recipe([config]), weights=False), read_turns(directory)
    skipped = WARMUP_STEPS
    if turns:
        # Steps before its last turn were made by other settings.
        recipe, skipped = with_settings(recipe, turns[-1].settings), turns[-1].step + 1
    _check(directory, recipe)
    records = {}
    for _, line in whole_lines(directory / METRICS_FILE):
        record = json.loads(line)
        records[int(record["step"])] = record
    graphs = [
        graph
        for graph in read_graphs(directory, None)
        if graph[0].step > skipped and graph[0].step in records
    ]
    if not graphs:
        raise NoRunError(
            f"{directory} has made {len(records)} steps, and the first {skipped} do not "
            "count: name a run that has made more"
        )
    first = graphs[0]
    for graph in graphs:
        if [_key(node) for node in graph] != [_key(node) for node in first]:
            raise RecipeError(
                f"{directory}: step {graph[0].step} made other calls than step {first[0].step}, so "
                "that their medians mean nothing: name a run of a recipe with a fixed step"
            )
        if any(node.state is not NodeState.DONE or node.block is not None for node in graph):
            raise RecipeError(
                f"{directory}: step {graph[0].step} has calls that were not finished, or that "
                "work on blocks of rows: name a run without schedule.sampler.block_rows"
            )
    shown = [records[graph[0].step] for graph in graphs]
    job = job_of(
        one_call_a_role(recipe),
        first,
        _work(one_call_a_role(recipe), first, shown),
        on_gpus=any("cpu" not in pool.devices for pool in recipe.pools.values()),
    )
    pools = {role: name for name, pool in recipe.pools.items() for role in pool.roles}
    timeline = Timeline(job.step, {role: list(recipe.pools).index(pools[role]) for role in pools})
    calls, steps, beside = [], [], []
    for graph, record in zip(graphs, shown, strict=True):
        seconds = [clock(_ended(node)) - clock(_started(node)) for node in graph]
        begun = min(node.queued_at for node in graph)
        step_s = clock(begun + record["time/step"]) - clock(begun)
        calls.append(seconds)
        steps.append(step_s)
        beside.append(step_s - timeline.period(seconds))
    return RecordedRun(
        name=directory.parent.name if directory.name == "run" else directory.name,
        job=job,
        layouts=own_layouts(recipe, job),
        pools=pools,
        seconds=tuple(statistics.median(one) for one in zip(*calls, strict=True)),
        step_s=statistics.median(steps),
        beside_s=statistics.median(beside),
    )


def last_settings(directory: Path) -> list[str]:
    """Texts for `--set` that give the recipe of a run the settings that it came to by tuning."""
    turns = read_turns(directory)
    settings = turns[-1].settings if turns else {}
    return [f"{name}={json.dumps(value)}" for name, value in settings.items()]


def _check(directory: Path, recipe: Recipe) -> None:
    sampler = recipe.schedule.sampler
    if not isinstance(sampler, SyncSamplerSpec) or sampler.block_rows:
        raise RecipeError(
            f"{directory}: schedule.sampler is {sampler.type} with block_rows "
            f"{sampler.block_rows}, whose calls overlap and wait for each other: name a run with "
            "{type: sync} and without blocks"
        )
    for name, pool in recipe.pools.items():
        if pool.lets_roles_sleep and len(pool.roles) > 1:
            raise RecipeError(
                f"{directory}: roles of pools.{name} sleep in turn, and how long that takes is not "
                "told apart from other waiting: name a run whose roles do not share GPUs"
            )
    for role in recipe.roles:
        if len(recipe.services_of(role)) > 1:
            raise RecipeError(
                f"{directory}: {role} has {len(recipe.services_of(role))} services, which share "
                "its calls: name a run with one service a role"
            )


def _work(recipe: Recipe, nodes: Sequence[Node], records: Sequence[Mapping[str, float]]) -> Work:
    """The rows, as long as they were."""
    node = next((one for one in nodes if one.method in ("generate", "read")), None)
    if node is None or not node.num_rows or "completion_length/mean" not in records[0]:
        return work_of(recipe)
    mean = statistics.median(record["completion_length/mean"] for record in records)
    prompt_tokens = round(node.num_tokens / node.num_rows - mean)
    return work_of(recipe, prompt_tokens=prompt_tokens, completion_tokens=mean)


def _key(node: Node) -> tuple[str, str, int]:
    return node.role, node.method, node.sequence


def _started(node: Node) -> float:
    assert node.started_at is not None  # it is done
    return node.started_at


def _ended(node: Node) -> float:
    assert node.ended_at is not None  # it is done
    return node.ended_at
