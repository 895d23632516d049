"""What of a model a client trains: an adapter of some shape, or all of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a client may choose of its model."""

    rank: int
    """Of the adapter; 0: there is none, and all weights are trained."""
    seed: int
    targets: tuple[str, ...] | None = None
    """Names of matrices with an adapter; None: all of the layers."""

    @property
    def files(self) -> str:
        """Name of the folder with its weights, below that of what was saved."""
        return "adapter" if self.rank else "model"

    def changes(self, saved: Path | None = None) -> dict[str, Any]:
        """What differs from the section `actor.model` of the server's recipe.

        Args:
            saved: Folder of what was saved, whose weights it begins with; None: the base's, with a
                new adapter.
        """
        weights = None if saved is None else str(saved / self.files)
        if not self.rank:
            return {} if weights is None else {"path": weights}
        return {
            "adapter": {
                "type": "lora",
                "rank": self.rank,
                # The scale is that of Tinker's service.
                "alpha": 32.0,
                "seed": self.seed,
                "targets": "all_linear" if self.targets is None else list(self.targets),
                **({} if weights is None else {"from": weights}),
            }
        }

    def told(self) -> dict[str, Any]:
        """As clients get it."""
        return {"is_lora": self.rank > 0, "lora_rank": self.rank or None}
