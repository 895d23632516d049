"""What an adapter was trained on: folder of the base, hash of its files, scale of the adapter."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rolemesh.engine.model_folders.model_files import CONFIG_FILE


class BaseIdentity:
    """Identity of a base, computed beside whatever else goes on.

    Reading a whole folder takes seconds for each 10 GB, and it is wanted first when a cut is saved
    or a checkpoint is loaded.

    Example::

        base = BaseIdentity(Path("model"), scale=2.0)
        base.facts()  # {"path": "/data/model", "sha256": "5f1c...", "scale": "2.0"}
    """

    def __init__(self, folder: Path, *, scale: float) -> None:
        """Begins to read the folder's config.json and safetensors."""
        self.folder = folder
        self._scale = scale
        reader = ThreadPoolExecutor(1, thread_name_prefix="base-identity")
        self._sha256: Future[str] = reader.submit(_sha256_of, folder)
        reader.shutdown(wait=False)

    def facts(self) -> dict[str, str]:
        """Path, hash and scale, JSON-able; waits for the hash.

        Raises:
            OSError: The folder cannot be read any more.
        """
        return {
            "path": str(self.folder.resolve()),
            "sha256": self._sha256.result(),
            "scale": repr(self._scale),
        }

    def refusal(self, saved: Mapping[str, str] | None) -> str:
        """Why a state that was saved over another base is of no use here; empty if it is not.

        Args:
            saved: What `facts` gave there; None where all weights were trained.
        """
        own = self.facts()
        if saved is None:
            return (
                "was saved without an adapter, but this model has one: leave model.adapter out, "
                "or begin a new run"
            )
        if saved["scale"] != own["scale"]:
            return (
                f"was trained with an adapter of scale {saved['scale']}, but model.adapter gives "
                f"{own['scale']}: give rank, alpha and scaling as there"
            )
        if saved["sha256"] == own["sha256"]:
            return ""
        is_same_path = saved["path"] == own["path"]
        told = "whose files have changed since" if is_same_path else f"not on {own['path']!r}"
        return (
            f"was trained on the base {saved['path']!r} (sha256 {saved['sha256'][:12]}), {told} "
            f"(sha256 {own['sha256'][:12]}): give the base that it was trained on"
        )


def _sha256_of(folder: Path) -> str:
    """Of the names and contents of config.json and of all safetensors, in the order of names."""
    digest = hashlib.sha256()
    for file in sorted([folder / CONFIG_FILE, *folder.glob("*.safetensors")]):
        with file.open("rb") as content:
            digest.update(f"{file.name} ".encode())
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
