"""Options of commands that place a recipe on a cluster, and the job that they say."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from rolemesh.coordinator.mapping.calibration.calibration import Calibration
from rolemesh.coordinator.mapping.errors import PlanError
from rolemesh.coordinator.mapping.job.from_recipe import job_of, one_call_a_role, work_of
from rolemesh.coordinator.mapping.job.job import Job, Wishes
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup, group_of
from rolemesh.coordinator.mapping.machines.devices import DEVICES, GBIT, device_of
from rolemesh.coordinator.mapping.report.report import UNMEASURED
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.planning import plan_step

Gpus = Annotated[
    list[int], typer.Option("--gpus", metavar="N", help="Devices; once for each --gpu.")
]
Gpu = Annotated[
    list[str], typer.Option("--gpu", metavar="NAME", help=f"Kind: {', '.join(DEVICES)}.")
]
PerMachine = Annotated[
    int | None, typer.Option(metavar="N", help="Devices of a machine; as is usual for a kind.")
]
Network = Annotated[
    float | None, typer.Option(metavar="GBIT", help="Gbit/s that a machine sends to others.")
]
PromptTokens = Annotated[
    int | None, typer.Option(min=0, help="Of a prompt, in the mean; all there is room for.")
]
CompletionTokens = Annotated[
    float | None, typer.Option(help="Of a completion, in the mean; all of max_new_tokens.")
]
Calibrations = Annotated[
    list[Path] | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Of `rolemesh calibrate`, one a kind of device; where that wrote it.",
    ),
]

_MOST_DEVICES = 4096


def groups_of(
    gpus: list[int],
    kinds: list[str],
    per_machine: int | None,
    network: float | None,
    measured: Mapping[str, Calibration],
) -> list[DeviceGroup]:
    """The cluster that the options say, as it was measured where it was.

    Raises:
        PlanError: They contradict each other, name too few or too many devices, or a kind that is
            not known.
    """
    if len(gpus) != len(kinds):
        raise PlanError(
            f"--gpus is given {len(gpus)} times and --gpu {len(kinds)} times: give both for each "
            "kind"
        )
    groups = []
    for count, kind in zip(gpus, kinds, strict=True):
        if not 0 < count <= _MOST_DEVICES:
            raise PlanError(f"--gpus is {count}: give 1 to {_MOST_DEVICES}")
        known = measured.get(kind)
        groups.append(
            group_of(
                device_of(kind) if known is None else known.described_device,
                count,
                coefficients=None if known is None else known.coefficients,
                per_machine=per_machine,
                network_bandwidth=None if network is None else network * GBIT,
            )
        )
    if len({kind == "cpu" for kind in kinds}) > 1:
        raise PlanError("--gpu names cpu and GPUs: a plan is for one or the other")
    return groups


def basis_of(kinds: Sequence[str], measured: Mapping[str, Calibration]) -> str:
    """What the seconds stand on, of each kind of device."""
    if not measured:
        return UNMEASURED
    return "; ".join(
        measured[kind].basis() if kind in measured else f"{kind}: {UNMEASURED}"
        for kind in dict.fromkeys(kinds)
    )


def planned_job(
    recipe: Recipe,
    groups: list[DeviceGroup],
    prompt_tokens: int | None,
    completion_tokens: float | None,
    *,
    wishes: Wishes | None = None,
    offload: bool = True,
) -> Job:
    """What is to be placed for a recipe on a cluster.

    Args:
        recipe: The recipe.
        groups: The cluster.
        prompt_tokens: Of a prompt, in the mean; None: all there is room for.
        completion_tokens: Of a completion, in the mean; None: all of max_new_tokens.
        wishes: Of the user.
        offload: Whether moments may lie in host memory between steps.

    Raises:
        RecipeError: Its step cannot be planned.
        PlanError: A model of which nothing is known.
    """
    planned = one_call_a_role(recipe)
    work = work_of(planned, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    try:
        nodes = asyncio.run(plan_step(planned))
    except ValueError as error:
        raise RecipeError(str(error)) from error
    return job_of(
        planned,
        nodes,
        work,
        on_gpus=any(group.device.kind == "gpu" for group in groups),
        wishes=wishes,
        most_slices=max(group.per_machine for group in groups),
        offload=offload,
    )
