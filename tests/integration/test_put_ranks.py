"""Rows that a client puts into a service of several ranks: the ranks share them out."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
from support.services import spawn_service

from rolemesh.coordinator.sdk import AsyncMesh, ColumnData, Columns


async def test_ranks_share_out_what_a_client_has_put(tmp_path: Path) -> None:
    service = spawn_service(tmp_path, "--layout", "tp=2,dp=2")
    rows = [list(range(length)) for length in (3, 17, 1, 40, 2, 9, 9)]
    try:
        async with AsyncMesh({"toy": service.address}, run_id="put") as mesh:
            await mesh["toy"].initialize({"layout": {"tp": 2, "dp": 2}})
            batch = await mesh["toy"].put(Columns({"tokens": ColumnData.sequence(rows)}))
            made = await mesh["toy"].compute_values(batch)
            values = await mesh.fetch(made, ["values"])
            for row, computed in zip(rows, values["values"].rows(), strict=True):
                np.testing.assert_array_equal(computed, np.array(row) + 1)
            shards = made.reference.groups[0].shards
            assert {shard.rank for shard in shards} == {0, 2}
            assert len({shard.address for shard in shards}) == 2
            # One release to the face frees what all ranks hold.
            assert await mesh.release() == batch.num_bytes + made.num_bytes
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
    finally:
        service.end()
