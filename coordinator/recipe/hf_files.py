"""Brings what a recipe names at the Hugging Face hub to this machine, for the command line alone.

Everything behind sees the folder in the hub's ordinary cache (HF_HOME), and the name with its
commit (`Recipe.hf_names`). The client of the hub decides on endpoint, token, proxies and progress;
it is imported where a recipe has such a name. Services never call this: they are offline.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hf_names import HfName, HfPlace, hf_places, with_values
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.specs import ModelFolderSpec, ModelSpec
from rolemesh.engine.specs.urls import masked_text, masked_url

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

_WEIGHTS = re.compile(r"model[\w.-]*\.safetensors")
_LIGHT = re.compile(r"[\w.-]+\.(json|jinja|txt|model|tiktoken)|additional_chat_templates/[^/]+")
"""Settings, tokenizers and templates. Nothing that could run code when it is read."""
_CHUNK = 1 << 22


def with_files(
    recipe: Recipe, *, weights: bool = True, fetches: bool = True, began_with: Recipe | None = None
) -> Recipe:
    """The recipe with folders of this machine where it names models at the hub.

    Args:
        recipe: As it was loaded.
        weights: Whether weights are needed; False brings settings and tokenizers alone.
        fetches: Whether what the cache lacks is fetched.
        began_with: The recipe of the run that goes on: names without a revision keep its commits.

    Raises:
        RecipeError: Something is not there, or cannot be had; names field, value and remedy.

    Example::

        found = with_files(load_recipe([path]))
        found.actor.model.path  # .../models--Qwen--Qwen3-0.6B/snapshots/c1899de...
        found.hf_names  # {"actor.model.path": "hf:Qwen/Qwen3-0.6B@c1899de..."}
    """
    places = list(hf_places(recipe))
    if not places:
        return recipe
    pins = {} if began_with is None else {one.field: one.text for one in hf_places(began_with)}
    hub = _Hub(fetches=fetches)
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for place in places:
        name = _pinned(_name_of(place), pins.get(place.field))
        is_read = weights and isinstance(place.spec, ModelSpec)
        found = hub.model(place.field, name, weights=is_read)
        values[place.field] = found.folder
        names[place.field] = str(found.name)
    resolved: Recipe = with_values(recipe, values)
    return resolved.knowing({**recipe.hf_names, **names})


def model_folder(text: str, field: str, *, weights: bool = True) -> tuple[HfName, Path]:
    """One model's name with its commit, and its folder.

    Args:
        text: The name.
        field: Where it was given, e.g. "--model".
        weights: As in with_files.

    Raises:
        RecipeError: As with_files.
    """
    found = _Hub(fetches=True).model(field, _parsed(field, text), weights=weights)
    return found.name, found.folder


def cache_folders(recipe: Recipe) -> dict[str, Path]:
    """Folder of the cache in which each name of a recipe would lie, by field.

    Raises:
        RecipeError: A name is none.
    """
    places = {one.field: _name_of(one) for one in hf_places(recipe)}
    return {field: _Hub(fetches=False).cache_folder(name) for field, name in places.items()}


def _name_of(place: HfPlace) -> HfName:
    if not isinstance(place.spec, ModelSpec | ModelFolderSpec):
        raise RecipeError(
            f"{place.field} is {place.text!r}, but only the paths of models may name something at "
            "the Hugging Face hub: give a path of this machine"
        )
    return _parsed(place.field, place.text)


def _parsed(field: str, text: str) -> HfName:
    try:
        return HfName.parse(text)
    except ValueError as error:
        raise RecipeError(f"{field} is {text!r}: {error}") from None


def _pinned(name: HfName, begun: str | None) -> HfName:
    """The name with the commit of the run that goes on, unless it asks for a revision itself."""
    if begun is None or name.revision is not None:
        return name
    kept = HfName.parse(begun)
    return kept if kept.is_pinned and name.at(str(kept.revision)) == kept else name


@dataclass(frozen=True, slots=True)
class _Found:
    name: HfName
    """With its commit."""
    folder: Path


@dataclass(kw_only=True)
class _Hub:
    """The hub, and the cache of what came from it, for the names of one recipe.

    Each branch is looked up once, so that all fields that name it get the same commit.
    """

    fetches: bool
    _commits: dict[HfName, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._client = _client()
        self._api = self._client.HfApi(library_name="rolemesh")
        # HF_HUB_OFFLINE, as the client reads it.
        self._is_offline = not self.fetches or self._client.constants.is_offline_mode()

    def cache_folder(self, name: HfName) -> Path:
        """Folder of all that the cache has of a repository."""
        from huggingface_hub.file_download import repo_folder_name

        folder = repo_folder_name(repo_id=name.repo, repo_type="model")
        return Path(self._client.constants.HF_HUB_CACHE).expanduser().resolve() / folder

    def model(self, field: str, name: HfName, *, weights: bool) -> _Found:
        """Folder of a model, with its weights or without."""

        def choose(files: Sequence[str]) -> list[str]:
            if "config.json" not in files:
                raise RecipeError(
                    f"{field} is {str(name)!r}, which has no config.json: name a model of "
                    "the form that transformers writes"
                )
            chosen = [one for one in files if _LIGHT.fullmatch(one)]
            if weights:
                tensors = [one for one in files if _WEIGHTS.fullmatch(one)]
                if not tensors:
                    raise RecipeError(
                        f"{field} is {str(name)!r}, which has no model*.safetensors (other "
                        "formats can run code and are not fetched): name a model that has them"
                    )
                chosen += tensors
            return chosen

        return self._found(field, name, choose)

    def _found(
        self, field: str, name: HfName, choose: Callable[[Sequence[str]], list[str]]
    ) -> _Found:
        with self._explained(field, name):
            if name not in self._commits:
                resolved = self._api.resolve_revision(
                    name.repo, revision=name.revision, local_files_only=self._is_offline
                )
                self._commits[name] = resolved.resolved
            pinned = name.at(self._commits[name])
            folder = self.cache_folder(name) / "snapshots" / str(pinned.revision)
            listed = self._listed(pinned)
            if listed is None:
                # A client that kept no list of files has fetched it.
                there = (one.relative_to(folder) for one in folder.rglob("*") if one.is_file())
                names = sorted(one.as_posix() for one in there)
            else:
                names = sorted(listed)
            if listed is None and not names:
                raise self._missing(field, pinned, "all of it")
            chosen = choose(names)
            absent = [one for one in chosen if not (folder / one).is_file()]
            if absent and self._is_offline:
                raise self._missing(field, pinned, f"{len(absent)} files, e.g. {absent[0]}")
            if absent:
                self._api.snapshot_download(
                    name.repo,
                    revision=pinned.revision,
                    allow_patterns=[glob.escape(one) for one in chosen],
                )
                _check_bytes(field, pinned, folder, [(listed or {})[one] for one in absent])
        return _Found(pinned, folder)

    def _listed(self, name: HfName) -> dict[str, RepoFile] | None:
        """The files of a commit by name; None where only the hub knows, and is not asked."""
        errors, client = self._client.errors, self._client
        try:
            files = client.get_cached_repo_tree(name.repo, revision=name.revision)
        except errors.CachedRepoTreeNotFoundError:
            if self._is_offline:
                return None
            entries = self._api.list_repo_tree(name.repo, revision=name.revision, recursive=True)
            files = [one for one in entries if isinstance(one, client.RepoFile)]
        return {one.path: one for one in files}

    def _missing(self, field: str, name: HfName, what: str) -> RecipeError:
        why = "HF_HUB_OFFLINE is set" if self.fetches else "nothing is fetched here"
        remedy = "unset it, or " if self.fetches else ""
        return RecipeError(
            f"{field} is {str(name)!r}: {why}, and the cache "
            f"{self._client.constants.HF_HUB_CACHE} lacks {what}: {remedy}run `rolemesh fetch "
            "RECIPE` on this machine while it reaches the hub"
        )

    @contextmanager
    def _explained(self, field: str, name: HfName) -> Iterator[None]:
        """Makes what the client raises an error that names field, value and remedy."""
        import httpx2

        errors = self._client.errors
        endpoint = masked_url(self._client.constants.ENDPOINT)
        login = "log in with `hf auth login`, or set HF_TOKEN"
        is_logged_in = self._client.get_token() is not None
        try:
            yield
        except errors.GatedRepoError as error:
            reason = (
                "the hub lets only those read it who have accepted its terms: accept them at "
                f"{endpoint}/{name.repo}, then {login}"
            )
            raise _refused(field, name, reason) from error
        except errors.RepositoryNotFoundError as error:
            access = "give a token that may read it" if is_logged_in else login
            reason = (
                f"{endpoint} has no such model that you may read: correct the name, or, "
                f"if it is private, {access}"
            )
            raise _refused(field, name, reason) from error
        except errors.RevisionNotFoundError as error:
            reason = f"the model has no revision {name.revision or 'main'!r}: name one that it has"
            raise _refused(field, name, reason) from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 403):
                reason = f"{endpoint} does not accept the token (status {status}): {login}"
            else:
                reason = f"{endpoint} answers with status {status}: try again later"
            raise _refused(field, name, reason) from error
        except errors.RevisionResolutionError as error:
            if self._is_offline:
                raise self._missing(field, name, "which commit that is") from error
            reason = (
                f"{endpoint} does not answer, and the cache lacks it: check the connection "
                "(HF_ENDPOINT, HTTPS_PROXY), or fetch it where there is one"
            )
            raise _refused(field, name, reason) from error
        except (OSError, httpx2.HTTPError) as error:
            told = masked_text(str(error)).partition("\n")[0]
            reason = f"it could not be fetched ({told}): try again; what came whole is kept"
            raise _refused(field, name, reason) from error


def _refused(field: str, name: HfName, reason: str) -> RecipeError:
    return RecipeError(f"{field} is {str(name)!r}: {reason}")


def _client() -> ModuleType:
    """The hub's client, which takes half a second to import."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"{error.name} is not installed here, which fetches what recipes name as hf:ORG/NAME: "
            "pip install huggingface_hub, or name a folder"
        ) from error
    return huggingface_hub


def _check_bytes(field: str, name: HfName, folder: Path, files: Iterable[RepoFile]) -> None:
    """Raises RecipeError where a fetched file is not the one that the hub lists.

    The client compares sizes alone. What is wrong is removed from the cache, where it would count
    as whole from then on.
    """
    for file in files:
        place_in_cache = folder / file.path
        if _is_as_listed(place_in_cache, file):
            continue
        place_in_cache.resolve().unlink()
        place_in_cache.unlink(missing_ok=True)
        reason = f"{file.path} came with other bytes than the hub lists, and was removed: try again"
        raise _refused(field, name, reason)


def _is_as_listed(path: Path, file: RepoFile) -> bool:
    if file.lfs is not None:
        digest, expected = hashlib.sha256(), file.lfs.sha256
    else:
        # As git names its blobs.
        digest, expected = hashlib.sha1(usedforsecurity=False), file.blob_id
        digest.update(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == expected
