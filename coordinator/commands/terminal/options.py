"""Arguments and options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunArgument = Annotated[
    Path | None, typer.Argument(metavar="[DIR]", help="Folder of a run; the newest one in runs/.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
HttpPort = Annotated[
    int, typer.Option(min=0, max=65535, help="Of the dashboard and REST; 0 takes a free one.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Holds the token that allows everything; else ROLEMESH_API_TOKEN does, if set; else "
        "one is made.",
    ),
]
Certificate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Speak TLS: a key and the certificate that goes with it, e.g. coordinator.pem of "
        "`rolemesh certs`.",
    ),
]
AllowRemote = Annotated[
    bool,
    typer.Option(
        "--allow-remote",
        help="Permit addresses that others can reach without TLS. Only inside a private network.",
    ),
]
OpenToEveryLocalUser = Annotated[
    bool,
    typer.Option(
        "--open-to-every-local-user",
        help="Ask for no token: every user of this machine may do what you may.",
    ),
]
Recipes = Annotated[
    list[Path], typer.Argument(metavar="RECIPE...", help="YAML files; a later one wins.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Sets a field; may be repeated."),
]
