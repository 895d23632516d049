"""Runs whose agents are shown images, and pass them on to the policy as they got them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import warm_processes
from support.image_tasks import data_of, write_task
from support.mesh_runs import CliRun

pytestmark = pytest.mark.timeout(1800)

WAIT_S = 1500
STEPS = 2
ROUNDING = 1e-4
"""Log-probs of sampler and trainer in float32. One that saw no image would be off by more than
0.01 (`tests/integration/test_endpoint_images.py`)."""

AGENT = '''
async def run(task, client):
    """One answer, and two ways on from it."""
    first = list(task["messages"])
    (turn,) = first
    assert [part["type"] for part in turn["content"]] == ["image_url", "text"]

    async def asked(messages):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=3
        )
        return answer.choices[0].message.content

    said = await asked(first)
    begun = [*first, {"role": "assistant", "content": said}]
    for question in ("left?", "right?"):
        said = await asked([*begun, {"role": "user", "content": question}])
    return float(bool(said) and ord(said[-1]) % 3 == int(task["answer"]))
'''


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two replicas of two slices": {"train": {"tp": 2, "dp": 2}, "generate": {"tp": 2}},
}


def recipe_of(task: Path, agent: Path, layouts: dict[str, Any]) -> dict[str, Any]:
    model = {"path": str(task / "model"), "compute_dtype": "float32"}
    return {
        "run": {
            "name": "shown",
            "seed": 1,
            "steps": STEPS,
            "prompts_per_step": 4,
            "evaluation": {"num_prompts": 0},
        },
        "algorithm": {
            "type": "grpo",
            "sampling": {"samples_per_prompt": 4, "max_new_tokens": 3},
            "mini_batch_rows": 8,
        },
        "actor": {
            "model": model,
            "optimizer": {"learning_rate": 3e-3},
            "rollout": {"type": "vllm", "max_model_len": 128, "dtype": "float32"},
            "data": data_of(task),
            "endpoint": {},
            "environment": {"type": "python_agent", "run": f"{agent}:run", "max_turns": 3},
            **layouts,
        },
        "reward": {"source": {"type": "environment"}},
        "services": {role: {"threads": 1} for role in ("actor", "reward")},
        "store": {"type": "memory"},
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_agents_are_shown_is_trained_as_it_was_sampled(layout: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", 1)
    agent = tmp_path / "seeing.py"
    agent.write_text(AGENT)
    # Services are forked from what has loaded vLLM, which takes ten seconds of computing.
    with_vllm = warm_processes.with_vllm()["ROLEMESH_TEST_WARM_RANKS"]
    variables = {"ROLEMESH_TEST_WARM_SERVICES": with_vllm}
    run = CliRun(recipe_of(task, agent, LAYOUTS[layout]), tmp_path, variables=variables)
    try:
        assert run.wait(WAIT_S) == 0, run.output
    finally:
        run.close()
    records = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == STEPS
    for record in records:
        assert record["sampler_logprob_diff_max"] < ROUNDING
        # Two ways on from a first answer are two rows, and the prompts of both show the picture.
        assert record["agents/rows"] == 32
        assert record["agents/calls/mean"] == 3
    samples = [json.loads(line) for line in (run.out / "samples.jsonl").read_text().splitlines()]
    assert samples
    assert all(len(one["images"]) == 1 for one in samples)
