"""The command line: `rolemesh train|coordinator|serve|status|logs|samples|trace|export|...`.

Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup

COMMANDS = {
    "init": "Writes a small recipe that trains a model on your data with your reward.",
    "import": "Writes a recipe from settings of TRL, OpenRLHF or verl.",
    "fetch": "Brings the models and data that a recipe names at the Hugging Face hub.",
    "check": "Looks for problems that would stop a recipe's run, or tells what a model can do.",
    "fit": "Estimates what each GPU of a recipe holds, and says what to change where it does not "
    "fit.",
    "plan": "Finds the placement and the layouts with the shortest step, by a cost model.",
    "simulate": "Plans a recipe and makes its run in virtual time: the real coordinator, simulated "
    "services.",
    "calibrate": "Measures this machine in about a minute, and writes what `rolemesh plan` then "
    "predicts with.",
    "train": "Makes a run of a recipe. Ctrl-C ends it after the step in progress, with everything "
    "saved.",
    "serve": "Serves one role in this process; `rolemesh serve ROLE --help` lists its settings.",
    "status": "Shows runs and, for one that goes on, its services.",
    "logs": "Prints the logs of a run, by role.",
    "samples": "Shows completions of a run: of the newest step, or the best or worst of all steps.",
    "experts": "Shows how even the loads of a mixture's experts were in a step: the most, and the "
    "least.",
    "compare": "Puts runs side by side: curves, held-out scores, and where their recipes differ.",
    "dashboard": "Serves the dashboard over runs that have ended, from their folders.",
    "trace": "Writes a run's calls as a Chrome trace, and shows what each step had to wait for.",
    "checkpoints": "Lists the checkpoints of a run, verifies and prunes them. Exit code 1: one is "
    "damaged.",
    "cuts": "Lists what runs keep in this host's shared memory, and removes what no live run "
    "holds.",
    "export": "Writes the policy of a checkpoint as a Hugging Face folder, or as a GGUF file.",
    "serve-policy": "Serves the policy of a run, a checkpoint or a model folder over OpenAI's "
    "protocol.",
    "tinker": "Serves Tinker's training API: clients train adapters on the recipe's model, and "
    "sample them.",
    "evaluate": "Scores policies on held-out rows and reasoning-gym tasks, with standard errors.",
    "doctor": "Checks what this machine has, and says what to do about what it lacks.",
    "compliance": "Holds a server to the contract of its role. Exit code 0: all that it MUST do, "
    "it does.",
    "coordinator": "Takes recipes over gRPC and REST, and makes each a run in a process of its "
    "own.",
    "certs": "Certificates of a mesh's members.",
    "render": "Files that start a mesh, made from a recipe.",
    "reward": "Rewards from outside.",
}
"""The commands in the order of the help, each with the first paragraph of its own help.

A new one is a line here, and a `typer.Typer` called `app` in commands/NAME.py, with "_" for "-",
which is imported once the command is called.
"""


class _CalledGroup(TyperGroup):
    """Imports the command that is called, and no other.

    The help lists placeholders, since most commands import half of the coordinator.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load_command(name), rest


app = typer.Typer(
    name="rolemesh",
    cls=_CalledGroup,
    help="RL post-training of language models as a mesh of model services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def load_command(name: str) -> Any:
    """The command of a name in COMMANDS, with all its options."""
    module = importlib.import_module(f"rolemesh.coordinator.commands.{name.replace('-', '_')}")
    return typer.main.get_command(module.app)


def _placeholder() -> None:
    raise NotImplementedError("load_command gives the command itself")


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(_placeholder)


def main() -> None:
    """Entry point of the `rolemesh` command, and of `python -m rolemesh`."""
    app(prog_name="rolemesh")


if __name__ == "__main__":
    main()
