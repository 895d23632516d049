"""Given answers about images are learned, by two ranks that cut each row."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.image_tasks import data_of, picture_rows, write_task
from support.learning_runs import write_rows
from support.mesh_runs import ended_run
from support.run_results import curve

pytestmark = pytest.mark.timeout(600)

STEPS = 24
WAIT_S = 500


@pytest.mark.slow
def test_answers_about_images_are_learned_by_two_ranks(tmp_path: Path) -> None:
    """The answer is in the picture alone: without it no loss would fall below that of guessing."""
    task = write_task(tmp_path / "task", seed=1)
    rows = picture_rows(task)
    write_rows(
        task / "rows.jsonl",
        [
            {"prompt": "?", "images": row["images"], "completion": "RGB"[int(row["answer"])]}
            for row in rows
        ],
    )
    recipe = {
        "run": {"name": "named", "seed": 1, "steps": STEPS, "prompts_per_step": 12},
        "algorithm": {"type": "sft", "mini_batch_rows": 12},
        "actor": {
            "model": {"path": str(task / "model"), "compute_dtype": "float32"},
            "optimizer": {"learning_rate": 1e-2},
            "train": {"dp": 2, "cp": 2},
            "data": data_of(task),
        },
        "services": {"actor": {"threads": 1}},
        "store": {"type": "memory"},
    }
    recipe["run"]["evaluation"] = {"num_prompts": 0}
    out = ended_run(recipe, tmp_path, timeout_s=WAIT_S)
    losses = curve(out, "nll")
    print([round(loss, 2) for loss in losses])
    # A mean over an answer and its end: guessing the colour costs half of ln 3, 0.55, at the least.
    assert losses[0] > 3
    assert losses[-1] < 0.1
