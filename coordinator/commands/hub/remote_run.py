"""A run that a coordinator elsewhere makes of a recipe from here: sent, and followed to its end."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rolemesh.coordinator.dataflow.observer import RunObserver
from rolemesh.coordinator.recipe.hub.hf_names import is_hf_name, put_names
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.sdk import (
    AsyncClient,
    Noted,
    Recovered,
    Resumed,
    Run,
    RunState,
    StateChanged,
    StepMade,
)
from rolemesh.engine.specs.urls import is_loopback
from rolemesh.rpc.address import host_of
from rolemesh.rpc.errors import RolemeshError

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_USER_CODE = re.compile(r"([^\s:]+\.py):([A-Za-z_]\w*)")
"""A class or function of a file, as recipes name it."""

_OF_THE_COORDINATOR = ("api", "store")
"""Sections that count for nothing there, and may hold what is only for here."""


class LeftError(Exception):
    """The user let go of a run, which goes on or stops without this process."""


def text_for(recipe: Recipe, address: str) -> str:
    """The recipe as YAML with every default, and with paths that the coordinator understands.

    A coordinator on a loopback address is taken to see the disks of this process: relative paths
    become absolute. Of another one they are refused, since they would count from its folder. Names
    at the Hugging Face hub stay names, which the coordinator looks up in its own cache.

    Args:
        recipe: The recipe.
        address: "host:port" of the coordinator.

    Raises:
        ValueError: A path is relative, and the coordinator is on another host; names each.
    """
    host = host_of(address)
    relative: list[str] = []
    sent = _placed(recipe.model_dump(), recipe.model_dump(mode="json"), "", relative)
    put_names(sent, recipe.hf_names)
    for section in _OF_THE_COORDINATOR:
        del sent[section]
    # The coordinator has folders of its own.
    sent["run"]["directory"] = None
    named = [name for name in relative if name.partition(".")[0] not in _OF_THE_COORDINATOR]
    if named and not is_loopback(host):
        raise ValueError(
            f"{', '.join(named)}: relative paths, which on the host of the coordinator {address} "
            "would start at its folder: give absolute paths of that host"
        )
    return yaml.safe_dump(sent, sort_keys=False, allow_unicode=True)


def _placed(value: Any, plain: Any, name: str, relative: list[str]) -> Any:
    """The plain value with absolute paths; names of fields whose paths were not go to a list."""
    match value:
        case dict():
            return {
                key: _placed(inner, plain[key], f"{name}.{key}" if name else key, relative)
                for key, inner in value.items()
            }
        case list() | tuple():
            return [
                _placed(inner, one, f"{name}.{place}", relative)
                for place, (inner, one) in enumerate(zip(value, plain, strict=True))
            ]
        case Path() if is_hf_name(value):
            return plain
        case Path():
            return _absolute(value, "", name, relative)
        case str():
            code = _USER_CODE.fullmatch(value)
            if code is not None:
                return _absolute(Path(code[1]), f":{code[2]}", name, relative)
    return plain


def _absolute(path: Path, after: str, name: str, relative: list[str]) -> str:
    if not path.is_absolute() and name != "run.directory":
        relative.append(name)
    return f"{path.absolute()}{after}"


async def make_there(
    recipe: Recipe, connect: Callable[[], AsyncClient], run_id: str, observer: RunObserver
) -> tuple[Run, bool]:
    """Has a coordinator make a run, and follows it to its end.

    The first SIGINT or SIGTERM asks the run to stop after the step in progress, with everything
    saved, and waits for that; the second one lets go of it.

    Args:
        recipe: The recipe.
        connect: Makes the client of the coordinator.
        run_id: Id of the run; a repeat with the same recipe follows the run that there is.
        observer: Told of what happens, in the words of a run of this process.

    Returns:
        The run as it ended, and whether a signal asked for its end.

    Raises:
        ValueError: No client can be made, or paths are relative; see text_for.
        LeftError: A second signal came.
        RolemeshError: The coordinator does not answer, or refuses.
    """
    loop = asyncio.get_running_loop()
    async with connect() as client:
        address = client.address
        run = await client.create_run(text_for(recipe, address), run_id=run_id)
        observer.on_event(f"{run_id}: made by the coordinator at {address}, in {run.directory}")
        watching = asyncio.create_task(_watch(client, run_id, observer))
        stops: list[asyncio.Task[bool]] = []

        def interrupt() -> None:
            if stops:
                watching.cancel()
            else:
                stops.append(asyncio.create_task(_stop(client, run_id, observer)))

        for number in _STOP_SIGNALS:
            # The parent process may want a signal ignored, e.g. nohup.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, interrupt)
        try:
            await watching
        except asyncio.CancelledError:
            is_asked = all(stop.done() and stop.result() for stop in stops)
            raise LeftError(
                f"{run_id} is left to its coordinator at {address}: "
                + ("it stops after its step" if is_asked else "whether it stops is not known")
            ) from None
        finally:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)
            for stop in stops:
                stop.cancel()
        return await client.get_run(run_id), bool(stops)


async def _stop(client: AsyncClient, run_id: str, observer: RunObserver) -> bool:
    """Asks the run to stop; returns whether the coordinator has taken that."""
    try:
        await client.stop_run(run_id)
    except RolemeshError as error:
        observer.on_event(f"{run_id} could not be asked to stop: {error.message}")
        return False
    observer.on_event(
        f"{run_id} is asked to stop after the step in progress; ask again to leave it to its "
        "coordinator"
    )
    return True


async def _watch(client: AsyncClient, run_id: str, observer: RunObserver) -> None:
    """Tells of what happens, until the run has ended."""
    async for event in client.watch_run(run_id):
        match event:
            case StepMade():
                observer.on_step(event.metrics)
            case Noted():
                observer.on_event(event.text)
            case StateChanged(state=RunState.RECOVERING):
                observer.on_event(f"recovering after {event.step} steps: {event.failure}")
            case Recovered():
                observer.on_event(f"recovered in {event.seconds:.1f} s: {event.cause}")
            case Resumed():
                observer.on_event(f"resuming {run_id} from {event.where}")


def facts_of(run: Run) -> Mapping[str, Any]:
    """How a run ended, as plain JSON values."""
    return {
        "run_id": run.run_id,
        "state": run.state.value,
        "failure": run.failure,
        "steps": run.step,
        "num_steps": run.num_steps,
        "directory": run.directory,
    }
