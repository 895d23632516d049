"""`rolemesh serve-policy`: a policy where any client of OpenAI's protocol finds it."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from rolemesh.coordinator.commands.policies.policy import find_policy
from rolemesh.coordinator.commands.policies.serving import (
    Served,
    ServingError,
    check_can_serve,
    served,
    wished,
)
from rolemesh.coordinator.commands.terminal.console import JsonConsole
from rolemesh.coordinator.commands.terminal.ending import EXIT_BAD_INPUT, EXIT_FAILED, fail
from rolemesh.coordinator.commands.terminal.options import Json

app = typer.Typer(add_completion=False)


@app.command()
def serve_policy(
    policy: Annotated[
        str,
        typer.Argument(
            metavar="POLICY",
            help="Folder or id of a run, folder of a checkpoint, model folder, or hf:ORG/NAME.",
        ),
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="To listen on; 0 takes a free one.")
    ] = 0,
    step: Annotated[int | None, typer.Option(help="Step of the checkpoint; the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The run's best checkpoint.")] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="A.B=C",
            help="A field of rollout or endpoint, e.g. rollout.max_model_len=2048; may be "
            "repeated.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Serves the policy of a run, a checkpoint or a model folder over OpenAI's protocol.

    A checkpoint is written as a model folder first, an adapter as a part of its base; the folder
    goes with the command. It answers on loopback, to whoever reaches the port: endpoint.host,
    endpoint.certificate and endpoint.token_variable change that. Ctrl-C ends it.

    Example: rolemesh serve-policy runs/mine-20261128-101500 --port 8000
    """

    def tell(text: str) -> None:
        if not as_json:
            print(f"{text} ...", flush=True)

    try:
        found = find_policy(policy, step=step, best=best)
        wish = wished(found, overrides or [], port)
        check_can_serve(wish.endpoint)
        with contextlib.suppress(KeyboardInterrupt), served(found, wish, tell=tell) as answering:
            if as_json:
                told = {"url": answering.url, "model": answering.model, "policy": found.name}
                JsonConsole().write("serving", told)
            else:
                _show(found.name, answering, wish.endpoint.token_variable)
            answering.process.wait()
    except ServingError as error:
        fail(str(error), EXIT_FAILED, as_json=as_json)
    except ValueError as error:
        fail(str(error), EXIT_BAD_INPUT, as_json=as_json)


def _show(name: str, answering: Served, key_variable: str | None) -> None:
    key = "none" if key_variable is None else f"${key_variable}"
    print(f"{name} answers as {answering.model!r} at {answering.url}")
    print(f"  use it: OPENAI_BASE_URL={answering.url} OPENAI_API_KEY={key}; Ctrl-C ends it")
    # Whoever waits for the line reads a pipe.
    print(end="", flush=True)
