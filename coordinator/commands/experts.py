"""`rolemesh experts`: how even the loads of a mixture's experts were in a step of a run."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rolemesh.coordinator.commands.terminal.console import JsonConsole
from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, fail
from rolemesh.coordinator.commands.terminal.options import Json, RunArgument
from rolemesh.coordinator.run.folders import folder as run_files
from rolemesh.coordinator.run.results.expert_loads import read_expert_loads
from rolemesh.coordinator.sdk.values.experts import LayerLoads
from rolemesh.v1 import coordinator_pb2

HEADINGS = ("layer", "most", "its expert", "least", "its expert")

app = typer.Typer(add_completion=False)


@app.command()
def experts(
    directory: RunArgument = None,
    step: Annotated[
        int | None, typer.Option(min=1, help="Of this step; without it, of the newest.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Shows how even the loads of a mixture's experts were in a step: the most, and the least."""
    try:
        found = run_files.newest_run() if directory is None else directory
        if not run_files.is_run(found):
            raise run_files.NoRunError(f"{found} holds no run: name the folder of a run")
        kept = {one.step: one for one in read_expert_loads(found)}
    except ValueError as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    if not kept:
        fail(
            f"{found} has no loads of experts: a run keeps them of each step that trains a mixture",
            EXIT_BAD_INPUT,
            as_json=as_json,
        )
    if step is not None and step not in kept:
        text = f"--step {step}: {found} has loads of steps {min(kept)} to {max(kept)}"
        fail(text, EXIT_BAD_INPUT, as_json=as_json)
    shown = kept[max(kept) if step is None else step]
    for role in shown.roles:
        if as_json:
            JsonConsole().write("experts", {"step": shown.step, **_as_json(role)})
        else:
            _show(Console(), shown.step, role)


def _as_json(told: coordinator_pb2.RoleLoads) -> dict[str, object]:
    loads = LayerLoads.of(told.layers)
    return {
        "role": told.role,
        "layers": loads.layers.tolist(),
        "choices": loads.choices.tolist(),
    }


def _show(console: Console, step: int, told: coordinator_pb2.RoleLoads) -> None:
    """A line a layer: loads, which are choices over the mean of the layer's experts."""
    loads = LayerLoads.of(told.layers)
    table = Table()
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for layer, load in zip(loads.layers, loads.load, strict=True):
        most, least = int(load.argmax()), int(load.argmin())
        table.add_row(str(layer), f"{load[most]:.3f}", str(most), f"{load[least]:.3f}", str(least))
    # A role is a name of the recipe, and no markup.
    head = (
        f"step {step}, {told.role}: {loads.choices.shape[1]} experts a layer; a load of 1 is even"
    )
    console.print(Text(head, style="bold"), soft_wrap=True)
    console.print(table)
