"""Reader of a run's folder, while the run goes on and afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rolemesh.coordinator.api.credentials import read_token
from rolemesh.coordinator.api.doors.known_doors import known_door
from rolemesh.coordinator.dataflow.futures import Node
from rolemesh.coordinator.recipe.role_names import ROLES
from rolemesh.coordinator.run.folders.ownership import COORDINATOR_FILE, living_coordinator
from rolemesh.coordinator.run.reporting.records import SUMMARY_FILE
from rolemesh.coordinator.run.results.metrics import GRAPHS_FILE
from rolemesh.coordinator.run.saving.resume import CONFIG_FILE, RUN_FILE, holds_run
from rolemesh.coordinator.run.services.launch import LOG_LINE
from rolemesh.coordinator.trackers.files import METRICS_FILE, whole_lines
from rolemesh.engine.messages import on_one_line
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.errors import RolemeshError
from rolemesh.v1 import coordinator_pb2, coordinator_pb2_grpc

RUNS_FOLDER = Path("runs")
"""Parent of the folders of runs that name none, relative to the current directory."""

LOG_NAMES = (*ROLES, "coordinator")

_MARKS = (SUMMARY_FILE, METRICS_FILE, CONFIG_FILE, COORDINATOR_FILE)
_FOLLOW_PAUSE_S = 0.2
_SHOWN_CHARACTERS = 400
"""Of a failure."""


UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OSError, yaml.YAMLError)
"""What comes of reading a file that is not as a run writes it."""


class NoRunError(ValueError):
    """There is no such run, or it lacks the requested part. The text is for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """State of a run."""

    directory: str
    state: str
    """A RunState, or "lost": its coordinator is gone and has left no summary; or "damaged"."""
    step: int
    num_steps: int | None
    changed_at: float
    """Unix time, seconds."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the newest step."""
    failure: str = ""
    services: dict[str, str] = field(default_factory=dict)
    """What each service does, by role; only while the run goes on."""
    recoveries: int = 0
    """How often it recovered from a failure; of a run that has ended, in its last process."""
    activity: str = ""
    """What it does, or why it ended before its last step without a failure."""
    endpoints: dict[str, str] = field(default_factory=dict)
    """Base URLs where programs ask its policy, by service; only while the run goes on."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


def is_run(directory: Path) -> bool:
    """Whether a folder holds a run."""
    return any((directory / name).is_file() for name in _MARKS)


def run_directories() -> list[Path]:
    """Folders in runs/ that hold a run, newest first.

    Raises:
        NoRunError: There are none.
    """
    folders = RUNS_FOLDER.iterdir() if RUNS_FOLDER.is_dir() else ()
    found = [folder for folder in folders if is_run(folder)]
    if not found:
        raise NoRunError(
            f"there is no run in {RUNS_FOLDER.absolute()}: name a run's folder, or start one with "
            "`rolemesh train RECIPE`"
        )
    return sorted(found, key=changed_at, reverse=True)


def newest_run() -> Path:
    """The newest run in runs/; raises NoRunError when there is none."""
    return run_directories()[0]


def run_of_id(run_id: str) -> Path:
    """Folder of the run with this id in runs/; raises NoRunError when there is none."""
    for folder in RUNS_FOLDER.iterdir() if RUNS_FOLDER.is_dir() else ():
        if read_json(folder / RUN_FILE).get("run_id") == run_id:
            return folder
    raise NoRunError(
        f"{run_id!r} is neither a folder nor the id of a run in {RUNS_FOLDER.absolute()}: name the "
        "folder of the run"
    )


def unfinished_run(name: str, directory: Path | None) -> Path | None:
    """The newest run of that name that has not come to its end; None where there is none.

    Args:
        name: Of the run, in its recipe.
        directory: The one folder to look at; None: all in runs/.

    Raises:
        NoRunError: A folder is damaged, and may hold the run that is to go on.
    """
    folders = [directory] if directory is not None else list(RUNS_FOLDER.glob("*/"))
    found = [folder for folder in folders if holds_run(folder)]
    for folder in sorted(found, key=changed_at, reverse=True):
        try:
            if read_config(folder)["run"]["name"] == name:
                summary = read_json(folder / SUMMARY_FILE)
                return None if summary and summary["state"] == "succeeded" else folder
        except UNREADABLE as error:
            raise NoRunError(
                f"{folder} cannot be read, and may hold the run {name!r} that is to go on "
                f"({told_damage(error)}): repair the file, move the folder away, or name the "
                "folder of the run with --out"
            ) from error
    return None


def changed_at(directory: Path) -> float:
    """When the newest file of a run was written, Unix time in seconds."""
    return max((directory / n).stat().st_mtime for n in _MARKS if (directory / n).is_file())


def read_status(directory: Path) -> RunStatus:
    """Reads the state of a run: from its coordinator while that lives, then from its files.

    A run whose files cannot be read is "damaged", and its failure says which one.

    Raises:
        NoRunError: The folder holds no run, or its coordinator asks for a token that is not there.
    """
    if not is_run(directory):
        raise NoRunError(f"{directory} holds no run: there is none of {', '.join(_MARKS)}")
    try:
        return _read_status(directory)
    except NoRunError:
        raise
    except UNREADABLE as error:
        return RunStatus(
            directory=str(directory),
            state="damaged",
            step=0,
            num_steps=None,
            changed_at=changed_at(directory),
            failure="a file of the folder is not as a run writes it "
            f"({told_damage(error)}): it was changed, or the disk was full",
        )


def _read_status(directory: Path) -> RunStatus:
    metrics = _last_record(directory / METRICS_FILE)
    coordinator = living_coordinator(directory)
    state, failure = "lost", ""
    services: dict[str, str] = {}
    endpoints: dict[str, str] = {}
    recoveries, activity = 0, ""
    step, config = int(metrics.get("step", 0)), read_config(directory)
    summary = directory / SUMMARY_FILE
    if summary.is_file():
        told = read_json(summary)
        state, failure, step = told["state"], told["failure"], told["steps"]
        # A run of an earlier version could not stop early.
        recoveries, activity = len(told.get("recoveries", ())), told.get("early_stop", "")
    elif coordinator is not None:
        address, run_id = str(coordinator["address"]), str(coordinator["run_id"])
        # The folder may be another user's, who writes there what they want to have sent to them. A
        # note is this user's, and of a coordinator that lives.
        known = known_door(address)
        token = None if known is None else _token(directory, known.token_file)
        run, services = asyncio.run(_ask(address, run_id, token))
        state = coordinator_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_").lower()
        recoveries, activity, endpoints = run.recoveries, run.activity, dict(run.endpoints)
    else:
        failure = "its coordinator has ended without a word: see its log"
    return RunStatus(
        directory=str(directory),
        state=state,
        step=step,
        num_steps=int(config["run"]["steps"]) if config else None,
        changed_at=changed_at(directory),
        metrics=metrics,
        failure=failure,
        services=services,
        recoveries=recoveries,
        activity=activity,
        endpoints=endpoints,
    )


def _token(directory: Path, token_file: Path | None) -> str | None:
    """The token of a run's coordinator: in its file, or as most likely here in its environment."""
    try:
        return read_token(token_file, os.environ)
    except ValueError as error:
        raise NoRunError(f"the coordinator of {directory} cannot be asked: {error}") from error


async def _ask(
    address: str, run_id: str, token: str | None
) -> tuple[coordinator_pb2.Run, dict[str, str]]:
    """Asks the coordinator of a live run for the run and its services."""
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    known = known_door(address)
    async with open_channel(address, identity=None if known is None else known.trust) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        try:
            listed = await stub.ListServices(
                coordinator_pb2.ListServicesRequest(), metadata=metadata
            )
            services = {known.role: known.status for known in listed.services}
            told = await stub.GetRun(
                coordinator_pb2.GetRunRequest(run_id=run_id), metadata=metadata
            )
        except RolemeshError as error:
            # Its store does not answer, or it asks for a token that is not known here.
            starting = coordinator_pb2.Run(state=coordinator_pb2.RUN_STATE_STARTING)
            return starting, {"coordinator": error.message}
    return told.run, services


def _last_record(path: Path) -> dict[str, float]:
    if not path.is_file():
        return {}
    lines = path.read_text().splitlines()
    # The newest line may be half written.
    for line in reversed(lines[-2:]):
        try:
            record: dict[str, float] = json.loads(line)
        except json.JSONDecodeError:
            continue
        return record
    return {}


def read_json(path: Path) -> dict[str, Any]:
    """What a file of a run's folder holds; nothing where there is no such file."""
    values: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return values


def read_config(directory: Path) -> dict[str, Any]:
    """The recipe of a run as plain JSON values; nothing where it has not got so far."""
    path = directory / CONFIG_FILE
    values: dict[str, Any] = yaml.safe_load(path.read_text()) if path.is_file() else {}
    return values


def told_damage(error: Exception) -> str:
    """One of UNREADABLE in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def print_status(console: Console, known: Sequence[RunStatus]) -> None:
    """A table of runs, and what each service of a running one does."""
    table = Table()
    numbers = ("step", "reward", "recovered")
    for heading in ("run", "state", *numbers, "changed"):
        justify: Literal["left", "right"] = "right" if heading in numbers else "left"
        # A shortened folder name could not be given to other commands.
        table.add_column(heading, justify=justify, overflow="fold")
    for one in known:
        reward = one.metrics.get("reward/mean")
        table.add_row(
            one.directory,
            one.state,
            f"{one.step}/{'?' if one.num_steps is None else one.num_steps}",
            "-" if reward is None else f"{reward:.3f}",
            f"{one.recoveries} times" if one.recoveries else "-",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.changed_at)),
        )
    console.print(table)
    for one in known:
        if one.state == "recovering":
            console.print(Text(f"{one.directory}  {one.activity}", style="yellow"), soft_wrap=True)
        elif one.state == "succeeded" and one.activity:
            console.print(Text(f"{one.directory}  {one.activity}"), soft_wrap=True)
        for role, doing in sorted(one.services.items()):
            console.print(Text(f"{one.directory}  {role:<12}{doing}"), soft_wrap=True)
        for service, url in sorted(one.endpoints.items()):
            told = f"{one.directory}  {service:<12}answers at {url}"
            console.print(Text(told), soft_wrap=True)
        if one.failure:
            told = f"{one.directory}  {_brief(one.failure)}"
            console.print(Text(told, style="red"), soft_wrap=True)


def _brief(failure: str) -> str:
    """A failure on one line, without the end of a log."""
    said, _, log = failure.partition(LOG_LINE)
    told = on_one_line(said, _SHOWN_CHARACTERS)
    hint = " ... (`rolemesh status DIR --json` has it all, `rolemesh logs DIR` more)"
    return told.removesuffix("...") + hint if log or told.endswith("...") else told


def log_files(directory: Path, role: str | None) -> list[Path]:
    """Logs of a run.

    Args:
        directory: The run's folder.
        role: Only the logs of this role, or of `coordinator`; None for all.

    Raises:
        NoRunError: There is no such log.
    """
    folder = directory / "logs"
    files = sorted(folder.glob("*.log")) if folder.is_dir() else []
    if not files:
        raise NoRunError(f"{directory} has no logs: name the folder of a run that was started here")
    if role is None:
        return files
    chosen = [path for path in files if path.stem == role]
    if not chosen:
        names = ", ".join(path.stem for path in files)
        raise NoRunError(f"{folder} has no log of {role!r}; it has {names}")
    return chosen


def print_logs(files: Sequence[Path], *, follow: bool) -> None:
    """Prints logs; with several logs, each line begins with the name of its log.

    Args:
        files: The logs.
        follow: Wait for more, until Ctrl-C.
    """
    streams = [(path.stem, path.open(encoding="utf-8", errors="replace")) for path in files]
    try:
        while True:
            for name, stream in streams:
                for line in stream:
                    prefix = f"{name}: " if len(files) > 1 else ""
                    sys.stdout.write(prefix + line)
            sys.stdout.flush()
            if not follow:
                return
            time.sleep(_FOLLOW_PAUSE_S)
    finally:
        for _, stream in streams:
            stream.close()


def read_graphs(directory: Path, step: int | None) -> list[list[Node]]:
    """Reads the executed graphs of a run; of a live run up to the newest complete line.

    Args:
        directory: The run's folder.
        step: Only the graph of this step; None for all.

    Returns:
        The nodes of each step, in the order of steps.

    Raises:
        NoRunError: There is no such run or step, or a line is not one that a run writes.
    """
    path = directory / GRAPHS_FILE
    if not path.is_file():
        raise NoRunError(
            f"{directory} has no {GRAPHS_FILE}: name the folder of a run that has made a step"
        )
    steps: list[int] = []
    graphs = []
    for number, line in whole_lines(path):
        try:
            graph = json.loads(line)
            steps.append(graph["step"])
            if step in (None, graph["step"]):
                graphs.append([Node.from_dict(node) for node in graph["nodes"]])
        except (ValueError, KeyError, TypeError) as error:
            raise NoRunError(
                f"line {number} of {path} is no executed graph ({error!r}): the file was changed, "
                "or written by another version of rolemesh"
            ) from error
    if not graphs:
        known = f"it has steps {min(steps)} to {max(steps)}" if steps else "it has no step yet"
        raise NoRunError(
            f"{directory} has no graph{'' if step is None else f' of step {step}'}: {known}"
        )
    return graphs
