"""Sends a model folder to the Hugging Face hub, by the hub's own client and the user's token."""

from __future__ import annotations

from pathlib import Path

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_client import hub_client
from rolemesh.coordinator.recipe.hub.hf_names import HfName
from rolemesh.engine.messages import on_one_line
from rolemesh.engine.specs.urls import masked_text, masked_url

_SENT = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "README.md")
"""Files of an exported model. Whatever else lies in the folder stays there."""
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


class PushError(RuntimeError):
    """The hub did not take a model. The text says why, and what to do."""


def check_can_push(name: str) -> None:
    """Raises RecipeError where it is plain before any work that nothing can be sent."""
    field = f"--push {name}"
    try:
        parsed = HfName.parse(f"hf:{name}")
    except ValueError:
        parsed = None
    if parsed is None or parsed.repo != name:
        raise RecipeError(f"{field}: give ORG/NAME, e.g. your user's name and a name of the model")
    client = hub_client()
    if client.constants.is_offline_mode():
        raise RecipeError(f"{field}: HF_HUB_OFFLINE is set: unset it")
    if client.get_token() is None:
        raise RecipeError(f"{field}: the hub takes a model from those it knows: {_LOGIN}")


def push(folder: Path, name: str, *, is_public: bool, message: str) -> str:
    """Sends a model; returns its page.

    Args:
        folder: An exported model, with a card.
        name: ORG/NAME. What is there already gets one commit more, and stays as visible as it is.
        is_public: Whether all may read it where it is new.
        message: Of the commit.

    Raises:
        PushError: The hub refuses, or does not answer.
    """
    import httpx2

    client = hub_client()
    endpoint = masked_url(client.constants.ENDPOINT)
    api = client.HfApi(library_name="rolemesh")
    try:
        api.create_repo(name, private=not is_public, exist_ok=True)
        api.upload_folder(
            repo_id=name,
            folder_path=folder,
            allow_patterns=list(_SENT),
            ignore_patterns=["*/*"],
            commit_message=message,
        )
    except client.errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            reason = f"the token may not write there (status {status}): give one that may"
        else:
            told = on_one_line(error.server_message or "no reason")
            reason = f"status {status}, {told}: try again later"
        raise PushError(f"--push {name}: {endpoint} refuses it: {reason}") from error
    except (OSError, httpx2.HTTPError, RuntimeError) as error:
        # The client makes a RuntimeError of what keeps a large file from being sent.
        cause = f" {error.__cause__}" if isinstance(error, RuntimeError) else ""
        told = on_one_line(masked_text(f"{error}{cause}"))
        raise PushError(
            f"--push {name}: it could not be sent ({told}): try again, what was sent is not sent "
            "twice"
        ) from error
    return f"{endpoint}/{name}"
