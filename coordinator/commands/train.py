"""`rolemesh train`: makes a run of a recipe in this process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console

from rolemesh.coordinator import sdk
from rolemesh.coordinator.api.credentials import read_token
from rolemesh.coordinator.api.doors.doors import Doors
from rolemesh.coordinator.commands.findings.cpu import cpu_here
from rolemesh.coordinator.commands.findings.placing import (
    load_placed,
    pools_on_cpu,
    start_cautions,
)
from rolemesh.coordinator.commands.hub.remote_run import LeftError, facts_of, make_there
from rolemesh.coordinator.commands.terminal.console import (
    JsonConsole,
    LiveConsole,
    LoggingObserver,
    PlainConsole,
    SturdyConsole,
    log_to,
    say,
)
from rolemesh.coordinator.commands.terminal.ending import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    fail,
)
from rolemesh.coordinator.commands.terminal.options import AllowRemote, Json, Overrides, Verbose
from rolemesh.coordinator.commands.terminal.summary import print_summary
from rolemesh.coordinator.dataflow.errors import NodeFailedError, RunAbortedError, RunError
from rolemesh.coordinator.explained.commented import commented_recipe
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_files import with_files
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.start_checks import services_in
from rolemesh.coordinator.run.folders import folder as run_files
from rolemesh.coordinator.run.folders.earlier_run import move_aside
from rolemesh.coordinator.run.folders.summary import RunSummary
from rolemesh.coordinator.run.reporting.records import make_run_id
from rolemesh.coordinator.run.saving.resume import CONFIG_FILE, ResumeError, open_run
from rolemesh.coordinator.run.services.host_gpus import HostGpus, host_gpus
from rolemesh.coordinator.run.services.launch import LaunchError
from rolemesh.coordinator.run.session import InputError, InterruptedEarlyError, Session
from rolemesh.coordinator.state.errors import StateStoreError
from rolemesh.coordinator.state.store import RunState
from rolemesh.engine.specs.urls import is_loopback
from rolemesh.rpc.address import host_of
from rolemesh.rpc.errors import (
    ForbiddenError,
    InvalidRequestError,
    PreconditionError,
    RolemeshError,
)

app = typer.Typer(add_completion=False)

_Shown: TypeAlias = JsonConsole | LiveConsole | PlainConsole


@app.command()
def train(
    recipe: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RECIPE...]", help="YAML files; a later one wins."),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the run's files.")
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="Id of the run; made if left out.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="DIR|ID",
            help="Go on with the run of this folder or id, from its newest step; needs no RECIPE.",
        ),
    ] = None,
    may_resume: Annotated[
        bool,
        typer.Option(
            "--restartable",
            help="Go on with the newest run of this recipe that has not succeeded, if any: "
            "for compose, systemd or Slurm, which start a command again.",
        ),
    ] = False,
    from_start: Annotated[
        bool,
        typer.Option(
            "--from-start",
            help="Begin anew in a folder that holds a run, which is moved to a folder within it.",
        ),
    ] = False,
    coordinator: Annotated[
        str | None,
        typer.Option(
            "--coordinator",
            metavar="HOST:PORT",
            help="Have this `rolemesh coordinator` make the run, and follow it from here: all its "
            "runs are on one page. A second Ctrl-C leaves the run to it.",
        ),
    ] = None,
    authority: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Of --coordinator: certificate of the authority that signed its own, e.g. "
            "authority.crt of `rolemesh certs`.",
        ),
    ] = None,
    identity: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Of --coordinator, at its --member-port: who you are, instead of a token, e.g. "
            "client-admin.pem of `rolemesh certs`.",
        ),
    ] = None,
    allow_remote: AllowRemote = False,
    as_json: Json = False,
    print_config: Annotated[
        bool,
        typer.Option(
            "--print-config",
            help="Print the resolved recipe with an explanation of each key, and do nothing.",
        ),
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Makes a run of a recipe. Ctrl-C ends it after the step in progress, with everything saved."""
    given = {
        "--out": out,
        "--resume": resume,
        "--restartable": may_resume or None,
        "--from-start": from_start or None,
    }
    of_another = {
        "--authority": authority,
        "--identity": identity,
        "--allow-remote": allow_remote or None,
    }
    try:
        for name, said in of_another.items():
            if coordinator is None and said is not None:
                raise InputError(f"{name}: it says how to reach --coordinator, which is missing")
        for name, value in given.items():
            if coordinator is not None and value is not None:
                raise InputError(
                    f"{name}: the coordinator at {coordinator} has the folders of its runs, and "
                    "starts them again by itself (resume_run of the SDK does, too): leave it out"
                )
        if from_start and (resume is not None or may_resume):
            goes_on = "--restartable" if resume is None else "--resume"
            raise InputError(f"--from-start: it begins anew, and {goes_on} goes on: leave one out")
        resumed = None if resume is None else _folder_of(resume)
        files = recipe or ([] if resumed is None else [resumed / CONFIG_FILE])
        if not files:
            raise InputError("RECIPE is missing: give a YAML file, or --resume with a run's folder")
        # A coordinator elsewhere places its runs on the GPUs of its own host.
        gpus = HostGpus() if coordinator is not None else host_gpus()
        loaded = load_placed(files, gpus, overrides=overrides or (), environment=os.environ)
        if print_config:
            print(commented_recipe(loaded), end="")
            return
        if may_resume and resumed is None:
            resumed = run_files.unfinished_run(loaded.run.name, out or loaded.run.directory)
        if coordinator is None:
            begun = None if resumed is None else open_run(resumed).recipe
            loaded = with_files(loaded, began_with=begun)
            directory = resumed or _run_directory(loaded, out)
            code = _train(
                loaded,
                directory,
                run_id,
                gpus,
                resumes=resumed is not None,
                begins_anew=from_start,
                as_json=as_json,
            )
        else:
            connect = _connecting(loaded, coordinator, authority, identity, allow_remote)
            code = _train_there(loaded, coordinator, connect, run_id, as_json=as_json)
    except (RecipeError, InputError, ResumeError, run_files.NoRunError) as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json, trace_of=error if verbose else None)
    except InterruptedEarlyError as error:
        fail(str(error), EXIT_INTERRUPTED, as_json=as_json, trace_of=error if verbose else None)
    except (RunError, LaunchError, StateStoreError, RolemeshError) as error:
        fail(str(error), _exit_code(error), as_json=as_json, trace_of=error if verbose else None)
    except Exception as error:
        logging.getLogger(__name__).critical("unexpected", exc_info=error)
        text = f"a fault of rolemesh itself: {type(error).__name__}: {error} (--verbose says where)"
        fail(text, EXIT_FAILED, as_json=as_json, trace_of=error if verbose else None)
    finally:
        _let_go_of_dead_streams()
    raise typer.Exit(code)


def _run_directory(recipe: Recipe, out: Path | None) -> Path:
    if out is not None:
        return out
    if recipe.run.directory is not None:
        return recipe.run.directory
    return run_files.RUNS_FOLDER / f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _folder_of(run: str) -> Path:
    """Folder of a run that can be resumed, given by folder or by id.

    Raises:
        NoRunError, ResumeError: There is none.
    """
    folder = Path(run) if Path(run).is_dir() else run_files.run_of_id(run)
    open_run(folder)
    return folder


def _shown(recipe: Recipe, console: Console, *, as_json: bool) -> _Shown:
    if as_json:
        return JsonConsole()
    if console.is_terminal:
        return LiveConsole(console, num_steps=recipe.run.steps)
    return PlainConsole(num_steps=recipe.run.steps)


def _connecting(
    recipe: Recipe,
    address: str,
    authority: Path | None,
    identity: Path | None,
    allow_remote: bool,
) -> Callable[[], sdk.AsyncClient]:
    """What makes the client of a coordinator; raises InputError for a file that cannot be used."""
    try:
        # An identity stands in the place of a token.
        token = None if identity else read_token(recipe.api.token_file, os.environ)
        return functools.partial(
            sdk.AsyncClient,
            address,
            token=token,
            identity=None if identity is None else sdk.Identity.read(identity),
            authority=authority,
            allow_remote=allow_remote,
        )
    except ValueError as error:
        raise InputError(f"--coordinator {address}: {error}") from error


def _train_there(
    recipe: Recipe,
    address: str,
    connect: Callable[[], sdk.AsyncClient],
    run_id: str | None,
    *,
    as_json: bool,
) -> int:
    """Has a coordinator make the run, and follows it; returns the exit code."""
    console = SturdyConsole()
    shown = _shown(recipe, console, as_json=as_json)
    observer = LoggingObserver(shown)
    run_id = run_id or make_run_id(recipe.run.name)
    try:
        if is_loopback(host_of(address)):
            # It sees the same cache, and fetches nothing itself.
            recipe = with_files(recipe)
        run, is_interrupted = asyncio.run(make_there(recipe, connect, run_id, observer))
    except RecipeError:
        raise
    except (ValueError, PreconditionError) as error:
        # Of the latter: it has another run of that id, or takes none.
        raise InputError(f"--coordinator {address}: {error}") from error
    except LeftError as error:
        raise InterruptedEarlyError(str(error)) from error
    except KeyboardInterrupt:
        raise InterruptedEarlyError(
            f"ended before the coordinator at {address} had answered: it may have begun {run_id}"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            shown.close()
    if run.state is sdk.RunState.FAILED:
        raise RunError(run.failure)
    told = f"{run_id} {run.state.value} after {run.step} of {run.num_steps} steps: {run.directory}"
    if isinstance(shown, JsonConsole):
        facts = facts_of(run)
        observer.show(lambda: JsonConsole().write("run", facts))
    else:
        observer.show(lambda: say(console, told))
    return EXIT_INTERRUPTED if is_interrupted else 0


def _train(
    recipe: Recipe,
    directory: Path,
    run_id: str | None,
    gpus: HostGpus,
    *,
    resumes: bool,
    begins_anew: bool,
    as_json: bool,
) -> int:
    console = SturdyConsole()
    shown = _shown(recipe, console, as_json=as_json)
    observer = LoggingObserver(shown)
    try:
        session = Session(
            recipe, directory, observer, run_id=run_id, resumes=resumes, begins_anew=begins_anew
        )
        session.tell_doors = functools.partial(tell_doors, shown, observer)
        aside = _moved_aside(session.directory) if begins_anew else None
        _log_to(session.directory / "logs" / "coordinator.log")
        observer.on_event(f"{session.run_id}: files and logs in {session.directory}")
        if aside is not None:
            observer.on_event(f"the run that was there lies in {aside}")
        for field, name in recipe.hf_names.items():
            observer.on_event(f"{field}: {name}")
        services = services_in(recipe)
        if pools_on_cpu(recipe, services):
            observer.on_event(f"CPU: {cpu_here()}")
        for caution in start_cautions(recipe, gpus, services):
            observer.on_event(f"caution: {caution.text}; {caution.remedy}")
        try:
            summary = asyncio.run(session.execute())
        except BaseException as error:
            logging.getLogger(__name__).error("the run ends: %s", error, exc_info=error)
            raise
    finally:
        with contextlib.suppress(OSError):
            # The terminal may be gone. The log has everything that could not be shown.
            shown.close()
    observer.show(lambda: _show_summary(summary, shown, console))
    if session.is_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if summary.state is RunState.FAILED else 0


def tell_doors(shown: _Shown, observer: LoggingObserver, doors: Doors) -> None:
    """Says where the run answers: to the owner on a terminal with the token, which no log gets.

    Args:
        shown: What the owner sees.
        observer: Passes on to it, and to the log.
        doors: Of the run.
    """
    told = doors.told(to_person=False)
    # A rich console may call a file a terminal, e.g. where FORCE_COLOR is set.
    if isinstance(shown, LiveConsole) and sys.stdout.isatty():
        logging.getLogger(__name__).info("%s", told)
        observer.show(lambda: shown.on_event(doors.told(to_person=True)))
    else:
        observer.on_event(told)


def _show_summary(summary: RunSummary, shown: _Shown, console: Console) -> None:
    if isinstance(shown, JsonConsole):
        shown.write("summary", summary.to_dict())
    else:
        print_summary(console, summary)


def _moved_aside(directory: Path) -> Path | None:
    try:
        return move_aside(directory)
    except ValueError as error:
        raise InputError(str(error)) from error


def _log_to(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log_to(path)
    except OSError as error:
        # The first file of the run: what keeps it from being written keeps all.
        raise InputError(
            f"run.directory: {path.parent.parent} cannot be written ({error.strerror}): choose "
            "another folder with --out"
        ) from error


def _exit_code(error: Exception) -> int:
    if isinstance(error, RunAbortedError):
        return EXIT_INTERRUPTED
    # A service refused its section of the recipe.
    refusals = (InvalidRequestError, ForbiddenError)
    is_refusal = isinstance(error, refusals)
    if not isinstance(error, NodeFailedError):
        is_refusal |= isinstance(error.__cause__, refusals)
    return EXIT_BAD_INPUT if is_refusal else EXIT_FAILED


def _let_go_of_dead_streams() -> None:
    """Drops unwritten output: at its end Python would try to flush it, and exit with code 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
