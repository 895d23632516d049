"""Held-out losses and accuracies of real runs, beside transformers on the same rows.

The oracles take log-probs and scores from the folder that a run starts from and from its trained
weights, and compute each formula of the papers in float64.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.learning_runs import learn, service_processes, write_rows
from support.learning_tasks import (
    VOCAB_SIZE,
    WORD_LENGTH,
    demonstrations,
    given_recipe,
    judgements,
    pairs,
    prompt_text,
    word_logprobs,
    write_task,
)
from support.run_results import learnt_of
from support.tiny_models import tiny_tokenizer
from transformers import AutoModelForSequenceClassification

from rolemesh.engine.train.export import export_policy

pytestmark = pytest.mark.timeout(300)

STEPS = 2
ROWS_A_STEP = 6
NUM_HELD_OUT = 7
NUM_EVALUATED = 5
"""Fewer than are held out: the first ones."""

BETA = 0.25
TOLERANCE = 2e-5
"""Sums of 7 log-probs in float32, by two implementations."""

ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "sft": {"type": "sft"},
    "dpo": {"type": "dpo", "policy_loss": {"type": "dpo", "beta": BETA}},
    "ipo": {"type": "dpo", "policy_loss": {"type": "dpo", "beta": BETA, "variant": "ipo"}},
    "kto": {"type": "kto", "policy_loss": {"type": "kto", "beta": BETA, "unwanted_weight": 0.5}},
    "reward_model": {"type": "reward_model", "reward_loss": {"centering": 0.01}},
}


@dataclass(frozen=True)
class Folders:
    """Models of a run: the one that it starts from, and the one that it has trained."""

    start: Path
    now: Path
    is_new_head: bool
    """Whether `now` is `start` with a new head, which no step has trained."""


Rows = Sequence[Mapping[str, Any]]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def right(leads: Sequence[float]) -> float:
    """Share of leads above 0; one of exactly 0 is half right."""
    return mean([1.0 if lead > 0 else 0.5 if lead == 0 else 0.0 for lead in leads])


def ratios(folders: Folders, rows: Sequence[tuple[str, str]]) -> list[float]:
    """The log-ratios log pi(y | x) - log pi_ref(y | x) of prompts and words."""
    now, before = (word_logprobs(folder, list(rows)) for folder in (folders.now, folders.start))
    return (now.double() - before.double()).tolist()


def sft(folders: Folders, rows: Rows) -> dict[str, float]:
    words = [(row["prompt"], row["completion"]) for row in rows]
    # All completions are equally long, so that a mean over rows is one over tokens.
    nll = -mean(word_logprobs(folders.now, words).double().tolist()) / (WORD_LENGTH + 1)
    return {"loss": nll, "nll": nll}


def preference(folders: Folders, rows: Rows, variant: str) -> dict[str, float]:
    chosen, rejected = (
        ratios(folders, [(row["prompt"], row[field]) for row in rows])
        for field in ("chosen", "rejected")
    )
    margins = [one - other for one, other in zip(chosen, rejected, strict=True)]
    losses = {
        "dpo": [-math.log(sigmoid(BETA * margin)) for margin in margins],
        "ipo": [(margin - 1 / (2 * BETA)) ** 2 for margin in margins],
    }[variant]
    return {
        "loss": mean(losses),
        "preference_accuracy": right(margins),
        "preference_margin": BETA * mean(margins),
        "chosen_reward": BETA * mean(chosen),
        "rejected_reward": BETA * mean(rejected),
    }


def kto(folders: Folders, rows: Rows) -> dict[str, float]:
    own = ratios(folders, [(row["prompt"], row["completion"]) for row in rows])
    following = [*rows[1:], rows[0]]
    others = [
        (row["prompt"], other["completion"]) for row, other in zip(rows, following, strict=True)
    ]
    point = max(0.0, mean(ratios(folders, others)))
    signs = [1 if row["label"] else -1 for row in rows]
    leads = [sign * (ratio - point) for sign, ratio in zip(signs, own, strict=True)]
    weights = [1.0 if sign == 1 else 0.5 for sign in signs]
    rewards = [
        BETA * mean([ratio for sign, ratio in zip(signs, own, strict=True) if sign == wanted])
        for wanted in (1, -1)
    ]
    return {
        "loss": mean([w * (1 - sigmoid(BETA * x)) for w, x in zip(weights, leads, strict=True)]),
        "preference_accuracy": right(leads),
        "preference_margin": rewards[0] - rewards[1],
        "kl_reference_point": point,
    }


@torch.no_grad()
def reward_model(folders: Folders, rows: Rows) -> dict[str, float]:
    tokenizer = tiny_tokenizer(VOCAB_SIZE)
    judge = None
    if not folders.is_new_head:
        judge = AutoModelForSequenceClassification.from_pretrained(folders.now, dtype=torch.float32)

    def score(row: Mapping[str, Any], field: str) -> float:
        tokens = tokenizer(prompt_text(row["prompt"]) + row[field])["input_ids"]
        # A new head is all zeros.
        return 0.0 if judge is None else float(judge(torch.tensor([tokens])).logits[0, 0])

    scores = [(score(row, "chosen"), score(row, "rejected")) for row in rows]
    margins = [chosen - rejected for chosen, rejected in scores]
    losses = [-math.log(sigmoid(margin)) for margin in margins]
    return {
        "loss": mean([x + 0.01 * sum(both) ** 2 for x, both in zip(losses, scores, strict=True)]),
        "preference_accuracy": right(margins),
        "preference_margin": mean(margins),
    }


def expected(name: str, folders: Folders, rows: Rows) -> dict[str, float]:
    if name in ("dpo", "ipo"):
        return preference(folders, rows, name)
    return {"sft": sft, "kto": kto, "reward_model": reward_model}[name](folders, rows)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    roles = ("actor", "reference", "reward")
    with service_processes(tmp_path_factory.mktemp("services"), roles) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"), seed=5)


def rows_of(name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows and held-out ones, whose prompts differ."""
    make: Any = {"sft": demonstrations, "kto": judgements}.get(name, pairs)
    found = make(3, STEPS * ROWS_A_STEP + NUM_HELD_OUT)
    parts = found[NUM_HELD_OUT:], found[:NUM_HELD_OUT]
    if name == "kto":
        # All letters become likelier, so that the reference point leaves 0.
        parts[0][:] = [{**row, "label": True} for row in parts[0]]
    for rows, prompts in zip(parts, ("abcd", "efgh"), strict=True):
        for number, row in enumerate(rows):
            row["prompt"] = prompts[number % 4]
    return parts


def recipe_of(name: str, task: Path, tmp_path: Path, num_prompts: int) -> dict[str, Any]:
    train, held_out = rows_of(name)
    recipe = given_recipe(
        task,
        ALGORITHMS[name],
        write_rows(tmp_path / "rows.jsonl", train),
        seed=5,
        steps=STEPS,
        rows_per_step=ROWS_A_STEP,
    )
    role = "reward" if name == "reward_model" else "actor"
    held_out_path = write_rows(tmp_path / "held_out.jsonl", held_out)
    recipe[role]["data"]["held_out_path"] = str(held_out_path)
    recipe["run"]["evaluation"] = {"num_prompts": num_prompts, "every_steps": 1}
    return recipe


@pytest.mark.parametrize("name", ALGORITHMS)
async def test_held_out_loss_and_accuracy_are_those_of_the_papers(
    name: str, task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    recipe = recipe_of(name, task, tmp_path, NUM_EVALUATED)
    run = await learn(recipe, services, tmp_path / "run")
    rows = rows_of(name)[1][:NUM_EVALUATED]
    summary = json.loads((tmp_path / "run/summary.json").read_text())["held_out"]
    start = task / "model"
    is_reward_model = name == "reward_model"
    trained = run.model
    if not is_reward_model:
        # A policy's own export is rounded to bfloat16.
        trained = tmp_path / "float32"
        export_policy(
            tmp_path / f"run/checkpoints/step-{STEPS:08}/actor", start, trained, "float32"
        )
    for moment, folders in (
        ("before", Folders(start, start, is_new_head=is_reward_model)),
        ("after", Folders(start, trained, is_new_head=False)),
    ):
        found, oracle = summary[moment], expected(name, folders, rows)
        assert (found["score"], found["num_prompts"]) == (None, NUM_EVALUATED)
        shared = {metric: found["metrics"][metric] for metric in oracle}
        assert shared == pytest.approx(oracle, rel=TOLERANCE, abs=TOLERANCE), moment
    # Each step's record has its own, and the last one what the summary says.
    for record in run.records:
        assert "held_out/loss" in record
    last = {f"held_out/{metric}": value for metric, value in summary["after"]["metrics"].items()}
    assert last.items() <= run.records[-1].items()
    assert summary["before"]["metrics"]["loss"] != summary["after"]["metrics"]["loss"]
    if name == "kto":
        assert summary["before"]["metrics"]["kl_reference_point"] == 0
        assert summary["after"]["metrics"]["kl_reference_point"] > 0.1
    if name in ("dpo", "kto", "reward_model"):
        # Nothing is told apart before the first step, and a guess is right half of the time.
        assert summary["before"]["metrics"]["preference_accuracy"] == 0.5


@pytest.mark.parametrize("name", ["dpo", "kto"])
async def test_an_evaluation_changes_nothing_that_is_learnt(
    name: str, task: Path, services: dict[str, str], tmp_path: Path
) -> None:
    found = []
    for number in (0, NUM_EVALUATED):
        folder = tmp_path / str(number)
        folder.mkdir()
        recipe = recipe_of(name, task, folder, number)
        run = await learn(recipe, services, folder / "run")
        records = [
            {key: value for key, value in learnt_of(record).items() if "held_out/" not in key}
            for record in run.records
        ]
        weights = b"".join(file.read_bytes() for file in sorted(run.model.glob("*.safetensors")))
        found.append((records, weights))
        assert ("held_out/loss" in run.records[0]) == (number > 0)
    assert found[0] == found[1]
