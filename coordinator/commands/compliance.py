"""`rolemesh compliance`: holds a server of any make to the contract of its role."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from rolemesh.coordinator.commands.terminal.console import JsonConsole
from rolemesh.coordinator.commands.terminal.ending import EXIT_FAILED, EXIT_INTERRUPTED, refuse
from rolemesh.coordinator.commands.terminal.options import Json
from rolemesh.coordinator.compliance.check import Finding
from rolemesh.coordinator.compliance.contract import ALL_ROLES
from rolemesh.coordinator.compliance.report import print_checks, print_findings, summarise
from rolemesh.coordinator.compliance.suite import SuiteInputError, checks_of, run_suite

app = typer.Typer(add_completion=False)


@app.command()
def compliance(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="grpc://host:port of the server.")
    ] = None,
    role: Annotated[str, typer.Option(help=", ".join(ALL_ROLES))] = "reward",
    spec: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML of Initialize's spec: the role's section of a recipe, or a whole recipe.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A check or a group of checks; may be repeated."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Deadline of each call, in s.")] = 30.0,
    serve_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where the suite serves experience; loopback by default."
        ),
    ] = None,
    identity: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="coordinator.pem of `rolemesh certs`, where the server has an identity.",
        ),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the checks and end.")] = False,
    as_json: Json = False,
) -> None:
    """Holds a server to the contract of its role. Exit code 0: all that it MUST do, it does."""
    if role not in ALL_ROLES:
        refuse(f"--role is {role!r}: give one of {', '.join(ALL_ROLES)}")
    names = only or []
    console = Console()
    try:
        if show_list:
            print_checks(console, checks_of(role, names))
            return
        if url is None:
            refuse("URL is missing: give grpc://host:port, or --list")
        section = {} if spec is None else _section(spec, role)
        shown = JsonConsole()

        def tell(finding: Finding) -> None:
            if as_json:
                shown.write("check", finding.to_dict())

        findings = asyncio.run(
            run_suite(
                url,
                role,
                section,
                names=names,
                timeout_s=timeout,
                serve_address=serve_address,
                identity=identity,
                on_finding=tell,
            )
        )
    except SuiteInputError as error:
        refuse(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        shown.write("verdict", {"text": summarise(findings)})
    else:
        print_findings(console, findings, url, role)
    if any(finding.is_failure for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def _section(path: Path, role: str) -> Mapping[str, Any]:
    """The role's part of a YAML file, which may be that part alone."""
    try:
        loaded = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SuiteInputError(f"--spec {path} cannot be read: {error}") from error
    if isinstance(loaded, dict) and "run" in loaded and isinstance(loaded.get(role), dict):
        loaded = loaded[role]
    if not isinstance(loaded, dict):
        raise SuiteInputError(f"--spec {path} is no mapping: give the section {role} of a recipe")
    return loaded
