"""The Hugging Face hub and the cache of what came from it, through the hub's own client.

Endpoint, token, proxies and progress are the client's, which is imported where it is needed. Every
error of it becomes one that names the field, the value and the remedy.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_names import HfName
from rolemesh.engine.messages import on_one_line
from rolemesh.engine.model_folders.adapter_config import CONFIG_FILE as ADAPTER_CONFIG
from rolemesh.engine.model_folders.adapter_config import WEIGHTS_FILE as ADAPTER_WEIGHTS
from rolemesh.engine.specs import folder_of_split
from rolemesh.engine.specs.urls import masked_text, masked_url

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

_WEIGHTS = re.compile(r"model[\w.-]*\.safetensors")
_LIGHT = re.compile(r"[\w.-]+\.(json|jinja|txt|model|tiktoken)|additional_chat_templates/[^/]+")
"""Settings, tokenizers and templates. Nothing that could run code when it is read."""
_CHUNK = 1 << 22

Kind = Literal["model", "dataset"]

_DEFAULT_REVISIONS: dict[Kind, str] = {"model": "main", "dataset": "refs/convert/parquet"}
"""Of data it is the branch to which the hub writes every public data set as Parquet, whatever its
own files are: CONFIG/SPLIT/0000.parquet."""
_TOLD: dict[Kind, str] = {"model": "model", "dataset": "data set"}
_PAGES: dict[Kind, tuple[str, ...]] = {"model": (), "dataset": ("datasets",)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What is to be brought."""

    field: str
    name: HfName
    kind: Kind

    @property
    def revision(self) -> str:
        """As the hub knows it."""
        return self.name.revision or _DEFAULT_REVISIONS[self.kind]

    def refused(self, reason: str) -> RecipeError:
        """The error that says why it cannot be had, and what to do."""
        return RecipeError(f"{self.field} is {str(self.name)!r}: {reason}")


@dataclass(frozen=True, slots=True)
class Found:
    """What was brought."""

    name: HfName
    """With its commit."""
    snapshot: Path
    """Folder of the commit in the cache."""
    files: Sequence[str]
    """What was brought of it."""
    part: str = ""
    """Folder in it that is named."""

    @property
    def folder(self) -> Path:
        """The folder that stands for the name."""
        return self.snapshot / self.part


@dataclass(kw_only=True)
class Hub:
    """The hub, and the cache of what came from it, for the names of one recipe.

    Each branch is looked up once, so that all fields that name it get the same commit.
    """

    fetches: bool
    _commits: dict[tuple[str, str, str], str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._client = hub_client()
        self._api = self._client.HfApi(library_name="rolemesh")
        # HF_HUB_OFFLINE, as the client reads it.
        self._is_offline = not self.fetches or self._client.constants.is_offline_mode()

    def cache_folder(self, wish: Wish) -> Path:
        """Folder of all that the cache has of a repository."""
        from huggingface_hub.file_download import repo_folder_name

        folder = repo_folder_name(repo_id=wish.name.repo, repo_type=wish.kind)
        return Path(self._client.constants.HF_HUB_CACHE).expanduser().resolve() / folder

    def model(self, wish: Wish, *, weights: bool) -> Found:
        """Folder of a model, with its weights or without."""

        def choose(files: Sequence[str]) -> list[str]:
            if "config.json" not in files:
                raise wish.refused(
                    "it has no config.json: name a model of the form that transformers writes"
                )
            chosen = [one for one in files if _LIGHT.fullmatch(one)]
            if weights:
                tensors = [one for one in files if _WEIGHTS.fullmatch(one)]
                if not tensors:
                    raise wish.refused(
                        "it has no model*.safetensors (other formats can run code and are not "
                        "fetched): name a model that has them"
                    )
                chosen += tensors
            return chosen

        return self._found(wish, choose)

    def adapter(self, wish: Wish, *, weights: bool) -> Found:
        """Folder of an adapter in PEFT's format, with its weights or without."""

        def choose(files: Sequence[str]) -> list[str]:
            wanted = (ADAPTER_CONFIG, *((ADAPTER_WEIGHTS,) if weights else ()))
            absent = [one for one in wanted if one not in files]
            if absent:
                raise wish.refused(
                    f"it has no {absent[0]}: name an adapter of the form that PEFT writes (other "
                    "formats can run code and are not fetched)"
                )
            return list(wanted)

        return self._found(wish, choose)

    def data(
        self,
        wish: Wish,
        splits: Iterable[str],
        *,
        config: str | None = None,
        one_of: Sequence[str] = (),
    ) -> Found:
        """Folder of a data set's configuration, with some splits.

        Args:
            wish: The data set.
            splits: What it must have.
            config: Folder of the configuration; None: the one folder that has the splits.
            one_of: Splits of which the first that is there is brought as well.
        """
        folders: set[PurePath] = set()

        def choose(files: Sequence[str]) -> list[str]:
            tables = [one for one in files if one.endswith(".parquet")]

            def parts(split: str, within: str | None) -> dict[str, PurePath]:
                every = {one: folder_of_split(PurePath(one), split) for one in tables}
                return {
                    one: folder
                    for one, folder in every.items()
                    if folder is not None and within in (None, str(folder))
                }

            chosen: list[str] = []
            for split in splits:
                found = parts(split, config)
                if not found:
                    raise wish.refused(_no_split(split, config, tables))
                folders.update(found.values())
                chosen += found
            if len(folders) > 1:
                several = ", ".join(sorted(map(str, folders)))
                raise wish.refused(
                    f"it has several configurations ({several}): name one, as in "
                    f"hf:{wish.name.repo}:{min(map(str, folders))}"
                )
            others = (parts(split, str(min(folders))) for split in one_of)
            return [*chosen, *next(filter(None, others), ())]

        found = self._found(wish, choose)
        return replace(found, part=str(min(folders)))

    def _found(self, wish: Wish, choose: Callable[[Sequence[str]], list[str]]) -> Found:
        kind, repo = wish.kind, wish.name.repo
        with self._explained(wish):
            key = (kind, repo, wish.revision)
            if key not in self._commits:
                resolved = self._api.resolve_revision(
                    repo,
                    repo_type=kind,
                    revision=wish.revision,
                    local_files_only=self._is_offline,
                )
                self._commits[key] = resolved.resolved
            wish = replace(wish, name=wish.name.at(self._commits[key]))
            folder = self.cache_folder(wish) / "snapshots" / wish.revision
            listed = self._listed(wish)
            if listed is None:
                # A client that kept no list of files has fetched it.
                there = (one.relative_to(folder) for one in folder.rglob("*") if one.is_file())
                names = sorted(one.as_posix() for one in there)
            else:
                names = sorted(listed)
            if listed is None and not names:
                raise self._missing(wish, "all of it")
            chosen = choose(names)
            absent = [one for one in chosen if not (folder / one).is_file()]
            if absent and self._is_offline:
                raise self._missing(wish, f"{len(absent)} files, e.g. {absent[0]}")
            if absent:
                self._api.snapshot_download(
                    repo,
                    repo_type=kind,
                    revision=wish.revision,
                    allow_patterns=[glob.escape(one) for one in chosen],
                )
                _check_bytes(wish, folder, [(listed or {})[one] for one in absent])
        return Found(wish.name, folder, chosen)

    def _listed(self, wish: Wish) -> dict[str, RepoFile] | None:
        """The files of a commit by name; None where only the hub knows, and is not asked."""
        errors, client = self._client.errors, self._client
        of_commit = {"repo_type": wish.kind, "revision": wish.revision}
        try:
            files = client.get_cached_repo_tree(wish.name.repo, **of_commit)
        except errors.CachedRepoTreeNotFoundError:
            if self._is_offline:
                return None
            entries = self._api.list_repo_tree(wish.name.repo, recursive=True, **of_commit)
            files = [one for one in entries if isinstance(one, client.RepoFile)]
        return {one.path: one for one in files}

    def _missing(self, wish: Wish, what: str) -> RecipeError:
        why = "HF_HUB_OFFLINE is set" if self.fetches else "nothing is fetched here"
        remedy = "unset it, or " if self.fetches else ""
        return wish.refused(
            f"{why}, and the cache {self._client.constants.HF_HUB_CACHE} lacks {what}: {remedy}run "
            "`rolemesh fetch RECIPE` on this machine while it reaches the hub"
        )

    @contextmanager
    def _explained(self, wish: Wish) -> Iterator[None]:
        """Makes what the client raises an error that names field, value and remedy."""
        import httpx2

        errors = self._client.errors
        endpoint = masked_url(self._client.constants.ENDPOINT)
        login = "log in with `hf auth login`, or set HF_TOKEN"
        what = _TOLD[wish.kind]
        try:
            yield
        except errors.GatedRepoError as error:
            page = "/".join((endpoint, *_PAGES[wish.kind], wish.name.repo))
            raise wish.refused(
                "the hub lets only those read it who have accepted its terms: accept them at "
                f"{page}, then {login}"
            ) from error
        except errors.RepositoryNotFoundError as error:
            is_known = self._client.get_token() is not None
            access = "give a token that may read it" if is_known else login
            raise wish.refused(
                f"{endpoint} has no such {what} that you may read: correct the name, or, if it is "
                f"private, {access}"
            ) from error
        except errors.RevisionNotFoundError as error:
            if wish.kind == "dataset" and wish.name.revision is None:
                raise wish.refused(
                    "the hub has not made Parquet files of it: if it has such files of its own, "
                    f"name their branch, as in hf:{wish.name.repo}@main, or download it, and give "
                    "its folder"
                ) from error
            raise wish.refused(
                f"the {what} has no revision {wish.revision!r}: name one that it has"
            ) from error
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 403):
                told = f"{endpoint} does not accept the token (status {status}): {login}"
            else:
                told = f"{endpoint} answers with status {status}: try again later"
            raise wish.refused(told) from error
        except errors.RevisionResolutionError as error:
            if self._is_offline:
                raise self._missing(wish, "which commit that is") from error
            raise wish.refused(
                f"{endpoint} does not answer, and the cache lacks it: check the connection "
                "(HF_ENDPOINT, HTTPS_PROXY), or fetch it where there is one"
            ) from error
        except (OSError, httpx2.HTTPError) as error:
            told = on_one_line(masked_text(str(error)))
            raise wish.refused(
                f"it could not be fetched ({told}): try again, what came whole is kept; with "
                "HF_HUB_OFFLINE=1 the cache alone answers"
            ) from error


def _no_split(split: str, config: str | None, tables: Sequence[str]) -> str:
    within = "" if config is None else f" in configuration {config!r}"
    some = ", ".join(tables[:5]) or "none"
    more = f" and {len(tables) - 5} more" if len(tables) > 5 else ""
    return (
        f"it has no Parquet files of split {split!r}{within}: name a split that it has (Parquet "
        f"files there: {some}{more})"
    )


def hub_client() -> ModuleType:
    """The hub's client, which takes half a second to import."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"{error.name} is not installed here, without which the Hugging Face hub cannot be "
            "asked (hf:ORG/NAME): pip install huggingface_hub, or name a folder"
        ) from error
    return huggingface_hub


def _check_bytes(wish: Wish, folder: Path, files: Iterable[RepoFile]) -> None:
    """Raises RecipeError where a fetched file is not the one that the hub lists.

    The client compares sizes alone. What is wrong is removed from the cache, where it would count
    as whole from then on.
    """
    for file in files:
        place = folder / file.path
        if not _is_as_listed(place, file):
            place.resolve().unlink()
            place.unlink(missing_ok=True)
            raise wish.refused(
                f"{file.path} came with other bytes than the hub lists, and was removed: try again"
            )


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
