"""A critic that is trained over the SDK, and whose cuts are looked at."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.services import operation_key, serving
from support.token_batches import token_batch

from rolemesh.coordinator.sdk import AsyncMesh, Experience, RetryPolicy

QUICK = RetryPolicy(budget_s=20.0, first_s=0.01, longest_s=0.05)


def critic_spec(model: Path, layout: Mapping[str, int] | None = None) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "compute_dtype": "float32"},
        "optimizer": {"learning_rate": 1e-3},
        "train": dict(layout or {}),
    }


@asynccontextmanager
async def batch_of_values() -> AsyncIterator[Experience]:
    """Rows that a critic is trained on, held by a service that nothing here kills."""
    async with serving() as producer:
        yield Experience(producer.runtime.publish(operation_key(), token_batch()))


def new_folder(within: Path) -> Path:
    """For a service of its own: one that was killed leaves its announcement behind."""
    folder = within / uuid.uuid4().hex
    folder.mkdir()
    return folder


@dataclass
class Speaker:
    """A coordinator of one epoch that trains a critic."""

    mesh: AsyncMesh
    batch: Experience
    folder: Path

    async def train(self, step: int) -> dict[str, float]:
        """One update; its metrics."""
        self.mesh.begin_step(step)
        critic = self.mesh["critic"]
        updated = await critic.update(self.batch, "ppo_value", mini_batch_rows=3)
        return dict(updated.report.metrics)

    async def fingerprint(self) -> str:
        """One hash over weights, optimizer, random state and counts, as a checkpoint has them."""
        saved = await self.mesh["critic"].save_state(str(self.folder / uuid.uuid4().hex))
        return saved.manifest_sha256


def speaking(address: str, run_id: str, epoch: int, **role: Any) -> AsyncMesh:
    return AsyncMesh({role.get("name", "critic"): address}, run_id=run_id, epoch=epoch, retry=QUICK)
