"""Adapters on their way to servers: a folder in PEFT's format, and a name that is never reused.

A server keeps keys and values by an adapter's name, and goes on with old factors where a name is
loaded again. So each update has a name of its own, which holds a digest of what was written: a name
can mean one thing only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import save_file

from rolemesh.engine.layout.adapters import split_factor
from rolemesh.engine.model_folders.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from rolemesh.engine.models.adapters.adapter_files import adapter_config, as_stored
from rolemesh.engine.models.adapters.adapters import module_in_layer
from rolemesh.engine.rollout.checksums import tensor_checksum
from rolemesh.engine.rollout.servers.client import (
    AnswerInvalidError,
    ServerClient,
    ServerError,
    ServerRefusedError,
    ServerUnavailableError,
)
from rolemesh.engine.specs import AdapterSpec

logger = logging.getLogger(__name__)

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"

KEPT = 2
"""Adapters that stay at the servers: the newest, and the one before it. Requests that were aborted
may still have a step to run, and ranks of one service do not take an update at the same moment."""

_SHORT_S = 10.0
"""Time for a request that does nothing but forget."""

_MODE = 0o644
"""Of files that servers of other users read, too."""


@dataclass(frozen=True, slots=True)
class WrittenAdapter:
    """An adapter of one update."""

    name: str
    """At the servers, and of its folder."""
    factors: Mapping[str, torch.Tensor]
    """By Hugging Face name, float32 on the host: what is written again where it was lost."""


class AdapterFolders:
    """Folders of adapters, in one that servers see. Owned by the compute thread.

    Example::

        folders = AdapterFolders(shared, None, AdapterSpec(rank=8), base, token="3f1c")
        written = folders.write(factors, policy_version=4)  # rolemesh-3f1c-v4-9b1e...
        folders.server_path(written)
    """

    def __init__(
        self,
        shared: Path,
        server_folder: str | None,
        spec: AdapterSpec,
        base: Path,
        *,
        token: str,
    ) -> None:
        """Makes the shared folder.

        Args:
            shared: Where they are written.
            server_folder: The same as servers name it; None: its absolute path here.
            spec: The adapter's.
            base: Folder of the base.
            token: Of the ranks that share the names, and of nobody else.

        Raises:
            ValueError: Nothing can be written there.
        """
        self._shared = shared.resolve()
        self._server_folder = server_folder or str(self._shared)
        self._spec = spec
        self._base = base
        self._token = token
        try:
            self._shared.mkdir(parents=True, exist_ok=True)
            probe = self._shared / f".rolemesh-{uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"rollout.shared_folder is {str(shared)!r}, where nothing can be written ({error}):"
                " give a folder that this service may write to and the servers may read"
            ) from error

    def write(self, factors: Mapping[str, torch.Tensor], policy_version: int) -> WrittenAdapter:
        """Writes an adapter aside and renames it, unless it is there.

        Args:
            factors: By Hugging Face name, float32 [R, I] of A, [O, R] of B, on the host.
            policy_version: Of them.
        """
        config = json.dumps(self._config(list(factors)), indent=2, sort_keys=True)
        digest = _digest(config, factors)
        written = WrittenAdapter(f"rolemesh-{self._token}-v{policy_version}-{digest}", factors)
        self.restore(written)
        return written

    def restore(self, written: WrittenAdapter) -> None:
        """Writes an adapter again, unless it is there."""
        folder = self._shared / written.name
        if folder.is_dir():
            return
        aside = self._shared / f".{written.name}-{uuid4().hex}"
        aside.mkdir(mode=0o755)
        try:
            save_file(
                dict(as_stored(written.factors.items(), self._base)),
                aside / WEIGHTS_FILE,
                metadata={"format": "pt"},
            )
            config = self._config(list(written.factors))
            (aside / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
            for file in (WEIGHTS_FILE, CONFIG_FILE):
                os.chmod(aside / file, _MODE)
            os.rename(aside, folder)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            # Another rank that writes the same was first.
            if not folder.is_dir():
                raise

    def server_path(self, written: WrittenAdapter) -> str:
        """The folder as servers name it."""
        return str(PurePosixPath(self._server_folder) / written.name)

    def remove(self, written: WrittenAdapter) -> None:
        """Removes an adapter's folder, if it is there."""
        shutil.rmtree(self._shared / written.name, ignore_errors=True)

    def _config(self, factors: Sequence[str]) -> Mapping[str, object]:
        modules = [module for module, _ in filter(None, map(split_factor, factors))]
        targets = list(dict.fromkeys(map(module_in_layer, modules)))
        return adapter_config(self._spec, targets, self._base, "CAUSAL_LM")


def _digest(config: str, factors: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.sha256(config.encode())
    for name, tensor in sorted(factors.items()):
        found.update(f"{name}:{tensor_checksum(tensor)}\n".encode())
    return found.hexdigest()[:16]


async def load(client: ServerClient, name: str, path: str, *, timeout_s: float) -> None:
    """Has a server load an adapter; one that has it by that name has the right one.

    Args:
        client: The server.
        name: Of the adapter.
        path: Of its folder, as the server names it.
        timeout_s: Most seconds.

    Raises:
        ServerUnavailableError: It cannot be reached.
        ServerRefusedError: It does not load it; says what to do.
    """
    body = {"lora_name": name, "lora_path": path}
    try:
        await client.post(LOAD, body, timeout_s=timeout_s)
    except ServerRefusedError as error:
        if error.status == 400 and "already been loaded" in error.words:
            return
        raise _not_loaded(error, error.status, str(error), path) from error
    except ServerUnavailableError as error:
        # It is the answer to any error within the engine, of which most would come again.
        if error.status != 500:
            raise
        await client.get("/health", timeout_s=_SHORT_S)
        raise _not_loaded(error, 500, str(error), path) from error


def _not_loaded(error: Exception, status: int, found: str, path: str) -> ServerRefusedError:
    if "No adapter found" in found:
        remedy = (
            f"it sees no folder {path!r}: give rollout.shared_folder a folder that it sees, and "
            "rollout.server_folder where it sees it under another path"
        )
    elif status in (404, 405):
        remedy = (
            "it loads no adapters while it runs: start it with --enable-lora and with "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        )
    else:
        remedy = (
            "start it with --enable-lora, a --max-lora-rank that is not below the rank of "
            "actor.model.adapter, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        )
    return ServerRefusedError(f"{found}: {remedy}", status=status, words=found)


async def names_at(client: ServerClient, *, timeout_s: float) -> set[str]:
    """Names of what a server serves, adapters among them; raises ServerError."""
    return {str(card.get("id")) for card in await models_at(client, timeout_s=timeout_s)}


async def models_at(client: ServerClient, *, timeout_s: float) -> list[dict[str, Any]]:
    """What a server says of each of its models and adapters; raises ServerError."""
    route = "/v1/models"
    answer = client.decoded(await client.get(route, timeout_s=timeout_s), route)
    cards = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards):
        raise AnswerInvalidError(
            f"{client.url}{route} lists no models: give urls of vLLM servers, without /v1"
        )
    return cards


async def unload(client: ServerClient, name: str) -> None:
    """Has a server forget an adapter; one that cannot be reached, or has it not, forgets by itself.

    Never fails: what stays costs the server a name.
    """
    try:
        await client.post(UNLOAD, {"lora_name": name}, timeout_s=_SHORT_S)
    except ServerError as error:
        logger.info("%s was not unloaded: %s", name, error)
