"""Rewards that look at images, in runs over services as they are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.image_tasks import data_of, write_task
from support.mesh_runs import CliRun
from support.reward_servers import reward_server
from support.tiny_models import write_tiny_classifier

from rolemesh.engine.specs import ClassifierRewardSpec, ModelSpec, OptimizerSpec
from rolemesh.engine.train.trainer import Trainer

pytestmark = pytest.mark.timeout(600)

WAIT_S = 400

SEEING = '''
"""1 where the picture has the colour that the answer names."""

def seen(completions, images, answer):
    found = []
    for (image,), wanted in zip(images, answer, strict=True):
        red, green, blue = image.convert("RGB").getpixel((0, 0))
        found.append(float([red, green, blue].index(max(red, green, blue)) == int(wanted)))
    return found


def blind(completions, **kwargs):
    return [float("images" in kwargs) for _ in completions]
'''


@pytest.fixture
def task(tmp_path: Path) -> Path:
    folder = write_task(tmp_path / "task", seed=1)
    (folder / "seeing.py").write_text(SEEING)
    return folder


def classifier_of(task: Path) -> Path:
    source = ClassifierRewardSpec(
        model=ModelSpec(path=task / "model", compute_dtype="float32"), new_head=True
    )
    trainer = Trainer.reward(source, OptimizerSpec())
    head = trainer.model.head.weight
    with torch.no_grad():
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(3)))
    trainer.export(task / "judge", dtype="float32")
    return task / "judge"


def recipe_of(task: Path, *sources: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": {
            "name": "seeing",
            "seed": 1,
            "steps": 2,
            "prompts_per_step": 3,
            "samples": 4,
            "evaluation": {"num_prompts": 0},
        },
        "algorithm": {
            "type": "grpo",
            "sampling": {"samples_per_prompt": 2, "max_new_tokens": 2},
            "mini_batch_rows": 6,
        },
        "actor": {
            "model": {"path": str(task / "model"), "compute_dtype": "float32"},
            "rollout": {"type": "hf", "max_model_len": 64, "dtype": "float32"},
            "data": data_of(task),
        },
        "reward": list(sources),
        "services": {role: {"threads": 1} for role in ("actor", "reward")},
        "store": {"type": "memory"},
    }


def function(task: Path, name: str) -> dict[str, Any]:
    source = {"type": "python", "function": f"{task / 'seeing.py'}:{name}"}
    return {"source": source, "name": name}


def test_functions_judges_and_classifiers_see_what_the_policy_is_shown(
    task: Path, tmp_path: Path
) -> None:
    folder = classifier_of(task)
    model = {"path": str(folder), "compute_dtype": "float32"}
    with reward_server() as server:
        judge = {"type": "openai_judge", "urls": server.url + "/v1", "model": "m"}
        run = CliRun(
            recipe_of(
                task,
                function(task, "seen"),
                function(task, "blind"),
                {"source": {"type": "classifier", "model": model}, "name": "model"},
                {"source": {**judge, "rubric": "{completion}", "maximum": 9}, "name": "judge"},
            ),
            tmp_path,
        )
        try:
            assert run.wait(WAIT_S) == 0, run.output
        finally:
            run.close()
    records = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        assert record["reward/seen/mean"] == 1.0
        assert record["reward/blind/mean"] == 0.0
        # Completions are two tokens of a random model: the pictures make the scores differ.
        assert record["reward/model/std"] > 0
        assert math.isfinite(record["reward/model/mean"])
    asked = [body["messages"][1]["content"] for _, body in server.requests]
    assert len(asked) == 12
    assert all(parts[0]["image_url"]["url"].startswith("data:image/png;") for parts in asked)
    lines = [json.loads(line) for line in (run.out / "samples.jsonl").read_text().splitlines()]
    assert [len(line["images"]) for line in lines] == [1] * 8
    sizes = {path.stat().st_size for path in (task / "pictures").iterdir()}
    assert {line["images"][0]["num_bytes"] for line in lines} <= sizes


def test_a_classifier_of_text_ends_a_run_over_images_by_name(task: Path, tmp_path: Path) -> None:
    folder = write_tiny_classifier(task / "text", seed=4)
    source = {"type": "classifier", "model": {"path": str(folder)}}
    run = CliRun(recipe_of(task, {"source": source}), tmp_path)
    try:
        assert run.wait(WAIT_S) != 0
        assert "has images, but the classifier in" in run.output
        assert "give source.model the folder of a" in run.output
    finally:
        run.close()
