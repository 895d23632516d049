"""Where the policy of a run that goes on is asked."""

from __future__ import annotations

from pathlib import Path

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.folders.folder import read_status


def live_url(run: Path) -> str:
    """The base URL of a run's endpoint; of several services, that of the first by name.

    The name of the variable with its key is not taken from the run: the folder may be another
    user's, who would choose which secret is sent where they say.

    Args:
        run: Its folder.

    Raises:
        RecipeError: It does not go on, or has no endpoint now; says what to do.
        NoRunError: Its coordinator asks for a token that is not there.
    """
    status = read_status(run)
    if status.endpoints:
        return status.endpoints[min(status.endpoints)]
    if status.state in ("running", "pausing", "paused", "stopping"):
        raise RecipeError(
            f"--live: {run} has no endpoint: start a run with `actor.endpoint: {{}}`, or score a "
            "checkpoint of this one without --live"
        )
    raise RecipeError(
        f"--live: {run} is {status.state} and answers nowhere: wait until it makes steps, or score "
        "a checkpoint of it without --live"
    )


def tokenizer_of(recipe: Recipe) -> Path | None:
    """Folder with the tokenizer of a run's policy; None where it is not here."""
    folder = None if recipe.actor is None else Path(recipe.actor.model.path)
    return folder if folder is not None and folder.is_dir() else None
