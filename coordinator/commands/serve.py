"""`rolemesh serve`: this process becomes a role."""

from __future__ import annotations

import difflib
import os
from typing import Annotated

import typer

from rolemesh.coordinator.commands.terminal.ending import refuse
from rolemesh.coordinator.commands.terminal.processes import become
from rolemesh.coordinator.recipe.role_names import ROLES
from rolemesh.coordinator.run.checks.installation import check_roles_run

app = typer.Typer(add_completion=False)


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
        refuse(f"no role {role!r}: roles are {', '.join(ROLES)}{hint}")
    try:
        check_roles_run()
    except ValueError as error:
        refuse(str(error))
    # The same settings as for the services of a run; launch.py gives the reasons.
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    become(f"rolemesh.services.{role}", *context.args)
