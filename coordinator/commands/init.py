"""`rolemesh init`: writes a small recipe for data and a reward that a user has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rolemesh.coordinator.commands.findings.diagnosis import QUICKSTART_MODEL
from rolemesh.coordinator.commands.recipes.given_inputs import GivenInput, given_data, given_model
from rolemesh.coordinator.commands.recipes.new_recipe import (
    OWN_REWARD,
    InitError,
    known_data,
    known_reward,
    recipe_text,
    tiny_model,
)
from rolemesh.coordinator.commands.terminal.ending import refuse
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.run.checks.installation import check_roles_run
from rolemesh.coordinator.state.files import write_atomically
from rolemesh.engine.model_folders.model_files import CONFIG_FILE, check_model_files

TINY_MODEL = Path(".models/tiny")

app = typer.Typer(add_completion=False)


@app.command()
def init(
    data: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="DATA",
            help="A .jsonl or .parquet file, the folder of a Hugging Face data set, or one of the "
            "hub: hf:ORG/NAME[:CONFIG[:SPLIT]].",
        ),
    ],
    reward: Annotated[
        str,
        typer.Option(
            metavar="REWARD",
            help="FILE.py:FUNCTION, grpc://host:port, http://host/..., or the type of one of ours, "
            "e.g. arithmetic.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|ORG/NAME",
            help="Hugging Face folder of the model to train, or its name at the hub.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Recipe to write.")] = Path(
        "my-recipe.yaml"
    ),
    prompt: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the prompt; found if left out.")
    ] = None,
    answer: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the answer; found if left out.")
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="Train an adapter (LoRA), and leave the model as it is."),
    ] = False,
    tiny: Annotated[
        bool, typer.Option("--tiny", help=f"For tries of seconds: a random model in {TINY_MODEL}.")
    ] = False,
) -> None:
    """Writes a small recipe that trains a model on your data with your reward.

    Example: rolemesh init --from my.jsonl --reward rewards.py:f --tiny
    """
    try:
        if out.exists():
            raise InitError(f"--out {out} exists: name another file, or remove it")
        if not out.absolute().parent.is_dir():
            raise InitError(f"--out {out}: there is no folder {out.parent}: make it first")
        check_roles_run()
        source = known_reward(reward)
        rows = given_data(data)
        if not rows.path.exists():
            raise InitError(
                f"--from {data} does not exist: give a file, a folder, or hf:ORG/NAME for a data "
                "set of the hub"
            )
        trained = _model(model, is_tiny=tiny)
        found = known_data(rows, trained.path, prompt, answer)
        if reward == OWN_REWARD and found.facts["answer"] is None:
            raise InitError(
                f"--reward {reward} compares with an expected answer, and no column of {data} "
                "looks like one: name it with --answer COLUMN"
            )
        lengths = found.lengths(trained.path, is_tiny=tiny)
        text = recipe_text(found, lengths, source, trained, out, is_tiny=tiny, has_adapter=adapter)
        write_atomically(out, text)
        load_recipe([out])
    except (InitError, RecipeError, ValueError) as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"--out {out} cannot be written: {error.strerror}")
    for line in found.told(lengths):
        print(line)
    print(f"{out}: written; next:")
    print(f"  rolemesh check {out}    # problems that would stop a run, in seconds")
    print(f"  rolemesh train {out}")


def _model(given: str | None, *, is_tiny: bool) -> GivenInput:
    """The model to train."""
    if is_tiny:
        if given is not None:
            raise InitError("--tiny makes a model of its own: leave --model out, or --tiny")
        return GivenInput(str(TINY_MODEL), tiny_model(TINY_MODEL))
    model = given_model(given or str(QUICKSTART_MODEL))
    folder = model.path
    if (folder / CONFIG_FILE).is_file():
        check_model_files(folder, field="--model", head="lm_head", has_tokenizer=True)
        return model
    if given is None:
        raise InitError(
            "--model is missing: give the local Hugging Face folder of the model to train, its "
            "name at the hub (ORG/NAME), or --tiny for a tiny random one"
        )
    what = "has no config.json" if folder.is_dir() else "is no folder"
    raise InitError(
        f"--model {folder} {what}: give a local Hugging Face model folder, ORG/NAME of a model of "
        "the hub, or --tiny for a tiny random one"
    )
