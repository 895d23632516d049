"""The command line: `rolemesh train|coordinator|serve|status|logs|trace|export|doctor|...`.

Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import importlib.util
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from rolemesh.coordinator import run_files
from rolemesh.coordinator.commands.compliance import compliance
from rolemesh.coordinator.commands.coordinator import coordinator
from rolemesh.coordinator.commands.reward import reward
from rolemesh.coordinator.console import (
    JsonConsole,
    LiveConsole,
    LoggingObserver,
    PlainConsole,
    SturdyConsole,
    print_summary,
)
from rolemesh.coordinator.doctor import Level, diagnose
from rolemesh.coordinator.errors import RunAbortedError, RunError
from rolemesh.coordinator.files import write_atomically
from rolemesh.coordinator.launch import LaunchError
from rolemesh.coordinator.recipe import ROLES, Recipe
from rolemesh.coordinator.recipe_errors import RecipeError
from rolemesh.coordinator.recipe_loading import dump_recipe, load_recipe
from rolemesh.coordinator.session import InputError, InterruptedEarlyError, Session
from rolemesh.coordinator.state.store import RunState, StateStoreError
from rolemesh.coordinator.summary import RunSummary
from rolemesh.coordinator.trace import chrome_trace, path_summary, print_paths
from rolemesh.rpc.errors import InvalidRequestError, RolemeshError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130

TRACED_STEPS_SHOWN = 20
"""Steps in the table of `rolemesh trace`, the newest ones; --step shows any other."""

app = typer.Typer(
    name="rolemesh",
    help="RL post-training of language models as a mesh of model services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunArgument = Annotated[
    Path | None, typer.Argument(metavar="[DIR]", help="Folder of a run; the newest one in runs/.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]


@app.command()
def train(
    recipe: Annotated[
        list[Path], typer.Argument(metavar="RECIPE...", help="YAML files; a later one wins.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Sets a field; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder of the run's files.")
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--run-id", metavar="ID", help="Id of the run; made if left out.")
    ] = None,
    as_json: Json = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved recipe and do nothing.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Makes a run of a recipe. Ctrl-C ends it after the step in progress, with everything saved."""
    try:
        loaded = load_recipe(recipe, overrides=overrides or (), environment=os.environ)
        if print_config:
            print(dump_recipe(loaded), end="")
            return
        code = _train(loaded, _run_directory(loaded, out), run_id, as_json=as_json)
    except (RecipeError, InputError) as error:
        _fail(str(error), EXIT_BAD_INPUT, error, as_json=as_json, verbose=verbose)
    except InterruptedEarlyError as error:
        _fail(str(error), EXIT_INTERRUPTED, error, as_json=as_json, verbose=verbose)
    except (RunError, LaunchError, StateStoreError, RolemeshError) as error:
        _fail(str(error), _exit_code(error), error, as_json=as_json, verbose=verbose)
    except Exception as error:
        logging.getLogger(__name__).critical("unexpected", exc_info=error)
        text = f"a fault of rolemesh itself: {type(error).__name__}: {error} (--verbose says where)"
        _fail(text, EXIT_FAILED, error, as_json=as_json, verbose=verbose)
    finally:
        _let_go_of_dead_streams()
    raise typer.Exit(code)


def _run_directory(recipe: Recipe, out: Path | None) -> Path:
    if out is not None:
        return out
    if recipe.run.directory is not None:
        return recipe.run.directory
    return run_files.RUNS_FOLDER / f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _train(recipe: Recipe, directory: Path, run_id: str | None, *, as_json: bool) -> int:
    console = SturdyConsole()
    shown: JsonConsole | LiveConsole | PlainConsole
    if as_json:
        shown = JsonConsole()
    elif console.is_terminal:
        shown = LiveConsole(console)
    else:
        shown = PlainConsole()
    observer = LoggingObserver(shown)
    try:
        session = Session(recipe, directory, observer, run_id=run_id)
        _log_to(session.directory / "logs" / "coordinator.log")
        observer.on_event(f"{session.run_id}: files and logs in {session.directory}")
        try:
            summary = asyncio.run(session.execute())
        except BaseException as error:
            logging.getLogger(__name__).error("the run ends: %s", error, exc_info=error)
            raise
    finally:
        with contextlib.suppress(OSError):
            # On a terminal that is gone; whatever could not be shown is in the log.
            shown.close()
    observer.show(lambda: _show_summary(summary, shown, console))
    if session.is_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if summary.state is RunState.FAILED else 0


def _show_summary(
    summary: RunSummary, shown: JsonConsole | LiveConsole | PlainConsole, console: Console
) -> None:
    if isinstance(shown, JsonConsole):
        shown.write("summary", summary.to_dict())
    else:
        print_summary(console, summary)


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=path,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s coordinator %(name)s: %(message)s",
        force=True,
    )


def _exit_code(error: Exception) -> int:
    if isinstance(error, RunAbortedError):
        return EXIT_INTERRUPTED
    # A service refused what the recipe says of it.
    is_refusal = isinstance(error, InvalidRequestError)
    is_refusal |= isinstance(error.__cause__, InvalidRequestError)
    return EXIT_BAD_INPUT if is_refusal else EXIT_FAILED


def _fail(
    text: str, code: int, error: Exception, *, as_json: bool = False, verbose: bool = False
) -> NoReturn:
    with contextlib.suppress(OSError):
        # Nobody reads it any more; the exit code still tells.
        if as_json:
            JsonConsole().write("error", {"text": text, "exit_code": code})
    with contextlib.suppress(OSError):
        if verbose:
            import traceback

            traceback.print_exception(error)
        print(f"error: {text}", file=sys.stderr)
    raise typer.Exit(code)


def _let_go_of_dead_streams() -> None:
    """Python flushes once more at its end, and would turn what is left into an exit code of 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


@app.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_extra_args": True,
        "help_option_names": [],
    }
)
def serve(
    context: typer.Context,
    role: Annotated[str, typer.Argument(metavar="ROLE", help=", ".join(ROLES))] = "--help",
) -> None:
    """Serves one role in this process; `rolemesh serve ROLE --help` lists its settings."""
    if role in ("--help", "-h"):
        print(f"Usage: rolemesh serve ROLE [SETTING]...\n\nROLE is one of {', '.join(ROLES)}.")
        print("`rolemesh serve ROLE --help` lists the settings.")
        return
    if role not in ROLES:
        near = difflib.get_close_matches(role, ROLES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"error: no role {role!r}: roles are {', '.join(ROLES)}{hint}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT)
    if importlib.util.find_spec("torch") is None:
        print(
            "error: services need torch, which is not installed here: install rolemesh[cpu] or "
            "rolemesh[gpu] (`make setup` in a checkout)",
            file=sys.stderr,
        )
        raise typer.Exit(EXIT_BAD_INPUT)
    # The current directory must not shadow a package.
    os.environ["PYTHONSAFEPATH"] = "1"
    # As for the services of a run: launch.py says why.
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"rolemesh.services.{role}", *context.args])


@app.command()
def status(directory: RunArgument = None, as_json: Json = False) -> None:
    """Shows runs and, for one that goes on, its services."""
    try:
        directories = run_files.run_directories() if directory is None else [directory]
        known = [run_files.read_status(found) for found in directories]
    except run_files.NoRunError as error:
        _fail(str(error), EXIT_BAD_INPUT, error)
    if as_json:
        for one in known:
            JsonConsole().write("run", one.to_dict())
    else:
        run_files.print_status(Console(), known)


@app.command()
def logs(
    directory: Annotated[
        str | None, typer.Argument(metavar="[DIR]", help="Folder of a run; the newest in runs/.")
    ] = None,
    role: Annotated[
        str | None, typer.Argument(metavar="[ROLE]", help="Only this one, or `coordinator`.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
) -> None:
    """Prints the logs of a run, by role."""
    if directory is not None and role is None and directory in run_files.LOG_NAMES:
        directory, role = None, directory
    try:
        found = run_files.newest_run() if directory is None else Path(directory)
        files = run_files.log_files(found, role)
        run_files.print_logs(files, follow=follow)
    except run_files.NoRunError as error:
        _fail(str(error), EXIT_BAD_INPUT, error)
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


@app.command()
def trace(
    directory: RunArgument = None,
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File to write; DIR/trace.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Writes a run's calls as a Chrome trace, and shows what each step had to wait for."""
    try:
        found = run_files.newest_run() if directory is None else directory
        graphs = run_files.read_graphs(found, step)
    except run_files.NoRunError as error:
        _fail(str(error), EXIT_BAD_INPUT, error, as_json=as_json)
    written = found / "trace.json" if out is None else out
    nodes = [node for graph in graphs for node in graph]
    try:
        write_atomically(written, json.dumps(chrome_trace(nodes)) + "\n")
    except OSError as error:
        text = (
            f"--out {written} cannot be written ({error.strerror}): name a file in another folder"
        )
        _fail(text, EXIT_BAD_INPUT, error, as_json=as_json)
    if as_json:
        for graph in graphs:
            JsonConsole().write("critical_path", path_summary(graph))
        JsonConsole().write("trace", {"file": str(written), "steps": len(graphs)})
        return
    console, shown = Console(), graphs[-TRACED_STEPS_SHOWN:]
    print_paths(console, shown)
    if len(shown) < len(graphs):
        console.print(f"The newest {len(shown)} of {len(graphs)} steps; the trace has all.")
    console.print(
        f"{written}: open it with https://ui.perfetto.dev or chrome://tracing",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Folder to write.")],
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; the newest.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Writes the policy of a checkpoint as a Hugging Face folder."""
    try:
        command = run_files.export_command(directory, step, to, dtype)
    except run_files.NoRunError as error:
        _fail(str(error), EXIT_BAD_INPUT, error)
    os.environ["PYTHONSAFEPATH"] = "1"
    sys.stdout.flush()
    os.execv(command[0], command)


@app.command()
def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="Also look for what it needs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Checks what this machine has, and says what to do about what it lacks."""
    try:
        loaded = None if recipe is None else load_recipe([recipe], environment=os.environ)
    except RecipeError as error:
        _fail(str(error), EXIT_BAD_INPUT, error, as_json=as_json)
    console = Console()
    colours = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
    worst = Level.OK
    for finding in asyncio.run(diagnose(loaded)):
        worst = max(worst, finding.level)
        if as_json:
            JsonConsole().write("finding", finding.to_dict())
            continue
        mark = f"[{colours[finding.level]}]{finding.level.name:4}[/]"
        console.print(f"{mark}  {finding.what:<15}", end="", highlight=False)
        console.print(finding.text, markup=False, highlight=False, soft_wrap=True)
        if finding.remedy:
            console.print(
                f"{'':21}-> {finding.remedy}", markup=False, highlight=False, soft_wrap=True
            )
    if worst is Level.FAIL:
        raise typer.Exit(EXIT_FAILED)


app.command()(compliance)
app.command()(coordinator)
app.add_typer(reward, name="reward")


def main() -> None:
    """Entry point of the `rolemesh` command."""
    app()


if __name__ == "__main__":
    main()
