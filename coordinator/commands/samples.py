"""`rolemesh samples`: completions of a run, while it goes on and afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from rolemesh.coordinator.commands.terminal.console import JsonConsole
from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, fail
from rolemesh.coordinator.commands.terminal.options import Json, RunArgument
from rolemesh.coordinator.run.folders import folder as run_files
from rolemesh.coordinator.run.results.samples_file import KeptSample, read_samples
from rolemesh.engine.messages import harmless
from rolemesh.rpc.samples.sessions import session_message
from rolemesh.v1 import coordinator_pb2

app = typer.Typer(add_completion=False)

_SHOWN_DIGITS = 12
"""Of an image's digest."""


@app.command()
def samples(
    directory: RunArgument = None,
    step: Annotated[
        int | None, typer.Option(min=0, help="Only of this step; 0: of the evaluation before all.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest rewards first.")] = False,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Only answers to held-out prompts.")
    ] = False,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="How many at most.")] = 8,
    as_json: Json = False,
) -> None:
    """Shows completions of a run: of the newest step, or the best or worst of all steps."""
    if best and worst:
        fail("--best and --worst: give one of them", EXIT_BAD_INPUT, as_json=as_json)
    try:
        found = run_files.newest_run() if directory is None else directory
        if not run_files.is_run(found):
            raise run_files.NoRunError(f"{found} holds no run: name the folder of a run")
        kept = [one for one in read_samples(found) if one.held_out or not held_out]
    except ValueError as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)
    chosen = _of_step(kept, step, is_ordered=best or worst)
    if not chosen:
        fail(_none(found, kept, step), EXIT_BAD_INPUT, as_json=as_json)
    if best or worst:
        chosen = sorted(
            (one for one in chosen if one.reward is not None),
            key=lambda one: one.reward or 0.0,
            reverse=best,
        )
    for one in chosen[:number]:
        if as_json:
            JsonConsole().write("sample", one.to_dict())
        else:
            _show(Console(), one)


def _of_step(
    kept: Sequence[KeptSample], step: int | None, *, is_ordered: bool
) -> Sequence[KeptSample]:
    """Those of a step; without one all that are to be ordered, or else the newest step's."""
    if step is None and is_ordered:
        return kept
    wanted = max((one.step for one in kept), default=0) if step is None else step
    return [one for one in kept if one.step == wanted]


def _none(directory: Path, kept: Sequence[KeptSample], step: int | None) -> str:
    if kept:
        steps = sorted({one.step for one in kept})
        known = f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
        return f"--step {step}: {directory} has samples of {known}"
    return (
        f"{directory} has no such samples: a run keeps them with run.samples above 0, once it has "
        "made a step or an evaluation"
    )


_USES = {
    coordinator_pb2.CALL_USE_TRAINED: "trained",
    coordinator_pb2.CALL_USE_SHARED: "shared with an earlier row",
    coordinator_pb2.CALL_USE_UNTRAINED: "kept out of training",
}


def _show_session(console: Console, session: coordinator_pb2.SampledSession) -> None:
    """Which branch of an agent's session a row is, its calls, and the agent's log."""
    head = (
        f"session of prompt {session.prompt_id}, sample {session.sample_index}: branch "
        f"{session.branch + 1} of {session.num_branches}"
    )
    if session.attempts > 1:
        head += f", attempt {session.attempts}"
    console.print(Text(head, style="dim"), soft_wrap=True)
    calls = [(call, _USES.get(call.use, "")) for call in session.calls]
    calls += [(call, "in no row, kept out of training") for call in session.left_out]
    for call, use in calls:
        told = f"  call {call.number}: {call.num_sampled_tokens} tokens, {use}"
        console.print(Text(told, style="dim"), soft_wrap=True)
    if session.log:
        console.print(Text("its agent wrote:", style="dim"), soft_wrap=True)
        # Of a service of any make, or a file of any user: nothing of it may move the cursor.
        console.print(Text(harmless(session.log).rstrip()), soft_wrap=True)


def _show(console: Console, sample: KeptSample) -> None:
    reward = "none" if sample.reward is None else f"{sample.reward:.3f}"
    if sample.reward_parts:
        parts = (f"{name} {value:.4g}" for name, value in sample.reward_parts.items())
        reward = f"{reward} ({', '.join(parts)})"
    kind = "held out, after step" if sample.held_out else "step"
    head = f"{kind} {sample.step}, row {sample.row}: reward {reward}, {sample.num_tokens} tokens"
    console.print(Text(head, style="bold"), soft_wrap=True)
    # Text of models and data is never markup.
    console.print(Text(sample.prompt, style="dim"), soft_wrap=True)
    for image in sample.images_message():
        told = f"image {harmless(image.sha256[:_SHOWN_DIGITS])}, {image.num_bytes} bytes"
        console.print(Text(told, style="dim"), soft_wrap=True)
    console.print(Text(sample.completion), soft_wrap=True)
    if sample.answer:
        console.print(Text(f"expected: {sample.answer}", style="dim"), soft_wrap=True)
    if sample.session is not None:
        _show_session(console, session_message(sample.session))
    console.print()
