"""Episodes of an evaluation at a real endpoint: those that the run's own sampler plays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.endpoints import MAX_MODEL_LEN, Sampler, Served
from support.episode_checks import OWN
from support.evaluations import scored, told_of

from rolemesh.engine.data.prompts import load_prompts
from rolemesh.engine.evaluation.asking import seed_of
from rolemesh.engine.evaluation.tasks import rows_of
from rolemesh.engine.model_folders.pretrained import load_tokenizer
from rolemesh.engine.rollout.episodes.episode import Episode
from rolemesh.engine.rollout.episodes.episodes import EpisodeRunner
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.specs.evaluation import DrawingSpec, EvaluatedTaskSpec, EvaluationQuestion

NUM_ROWS = 4

ENVIRONMENTS = (
    OWN
    + '''

class Asks(Environment):
    """Answers turns by messages of the chat, and knows which prompt of the run it has."""

    def reset(self, row):
        self._row = row

    def step(self, completion_text):
        said = f"row {self._row.prompt_id} of {len(self._row.tokens)}"
        return Observation(messages=({"role": "user", "content": said},), reward=0.25)

class Falls(Nods):
    def step(self, completion_text):
        if self._number == "2":
            raise OSError("the tool is out of order")
        return super().step(completion_text)

    def reset(self, row):
        self._number = row.answer
        return super().reset(row)
'''
)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("environments") / "own.py"
    path.write_text(ENVIRONMENTS)
    return path


def question(
    served: Served, folder: Path, tasks: dict[str, dict[str, Any]], **drawing: Any
) -> EvaluationQuestion:
    rows = folder / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"count to {number}", "answer": number}) + "\n"
            for number in range(NUM_ROWS)
        )
    )
    train = folder / "train.jsonl"
    train.write_text('{"prompt": "trained on", "answer": "9"}\n')
    shared = {
        "data": {"type": "jsonl", "path": str(train), "held_out_path": str(rows)},
        "reward": {"type": "environment"},
    }
    return EvaluationQuestion.model_validate(
        {
            "asked": {"url": f"{served.endpoint.url}/v1", "tokenizer": str(served.sampler.folder)},
            "drawing": {"max_tokens": 60, **drawing},
            "tasks": [{"name": name, **shared, **task} for name, task in tasks.items()],
        }
    )


def own(code: Path, name: str, **task: Any) -> dict[str, Any]:
    """A task with an environment of the file."""
    place = {"type": "python", "environment": f"{code}:{name}"}
    return {"environment": {**place, "max_turns": 3, "max_turn_tokens": 9}, **task}


def played_by_the_run(
    sampler: Sampler, task: EvaluatedTaskSpec, drawing: DrawingSpec
) -> list[Episode]:
    """The same rows as a run plays them: its prompts, its runner, its sampler in the process."""
    assert task.environment is not None
    tokenizer = load_tokenizer(sampler.folder)
    prompts = load_prompts(task.data, tokenizer=tokenizer, seed=1).slice("held_out", 0, NUM_ROWS)
    seeds = [
        seed_of(drawing, task.name, row, sample)
        for row in rows_of(task, tokenizer)
        for sample in range(drawing.samples)
    ]
    each = [prompt for prompt in prompts for _ in range(drawing.samples)]
    requests = [
        RolloutRequest(row=number, prompt_tokens=prompt.tokens, seed=seed)
        for number, (prompt, seed) in enumerate(zip(each, seeds, strict=True))
    ]
    runner = EpisodeRunner(task.environment, tokenizer, task.max_model_len or MAX_MODEL_LEN)
    backend, sampling = sampler.backend, drawing.sampling()
    found = sampler.do(lambda: list(runner.run(backend, each, requests, sampling)))
    return sorted(found, key=lambda one: one.row)


def scored_as_the_run_plays(
    served: Served, asked: EvaluationQuestion
) -> dict[str, list[dict[str, Any]]]:
    """The rows of each task, each of which the run plays as well."""
    told = scored(asked.model_dump_json())
    rows = {task.name: [row for row in told if row["task"] == task.name] for task in asked.tasks}
    text = served.sampler.tokenizer.decode
    for task in asked.tasks:
        if task.name == "falls":
            continue
        expected = played_by_the_run(served.sampler, task, asked.drawing)
        assert len(rows[task.name]) == len(expected) == NUM_ROWS * asked.drawing.samples
        for row, episode in zip(rows[task.name], expected, strict=True):
            assert row["completion"] == text(episode.completion_tokens, skip_special_tokens=True)
            assert row["score"] == episode.reward
            assert row["num_tokens"] == sum(episode.loss_mask)
            assert row["finish_reason"] == episode.finish_reason
    return rows


def test_greedy_episodes_are_those_of_the_runs_own_sampler(
    served: Served, code: Path, tmp_path: Path
) -> None:
    tasks = {
        "nods": own(code, "Nods"),
        "bounded": own(code, "Nods", max_model_len=48),
        "asks": own(code, "Asks"),
        "falls": own(code, "Falls"),
    }
    rows = scored_as_the_run_plays(served, question(served, tmp_path, tasks))
    assert all(row["completion"].startswith(" hello") for row in rows["nods"])
    assert any(" mhm " in row["completion"] for row in rows["nods"])
    # The longest sequence leaves less than the drawing allows.
    assert all(row["finish_reason"] == "length" for row in rows["bounded"])
    pairs = zip(rows["nods"], rows["bounded"], strict=True)
    assert all(row["num_tokens"] > less["num_tokens"] for row, less in pairs)
    # The one row of training is numbered first.
    assert all(f"row {1 + row['row']} of" in row["completion"] for row in rows["asks"])
    assert all(row["score"] >= 0.25 for row in rows["asks"])
    # An environment that fails leaves its own row unscored.
    falls = rows["falls"]
    assert [one["score"] is None for one in falls] == [False, False, True, False]
    assert "Falls failed for prompt 3" in falls[2]["why"]
    assert "the tool is out of order" in falls[2]["why"]


def test_drawn_episodes_are_those_that_the_runs_own_sampler_draws_by_the_same_seeds(
    served: Served, code: Path, tmp_path: Path
) -> None:
    calculator = {"type": "calculator", "max_turn_tokens": 9}
    tasks = {"nods": own(code, "Nods"), "calculator": {"environment": calculator}}
    asked = question(served, tmp_path, tasks, samples=2, temperature=0.9, seed=5)
    rows = scored_as_the_run_plays(served, asked)
    assert len({row["completion"] for row in rows["nods"]}) == 2 * NUM_ROWS


def test_what_cannot_be_played_says_what_to_give(
    served: Served, code: Path, tmp_path: Path
) -> None:
    def told(max_model_len: int | None, **asked: Any) -> dict[str, Any]:
        tasks = {"asks": own(code, "Asks", max_model_len=max_model_len)}
        given = question(served, tmp_path, tasks)
        given = given.model_copy(update={"asked": given.asked.model_copy(update=asked)})
        (error,) = [one for one in told_of(given.model_dump_json()) if one["type"] == "error"]
        assert error["is_input"]
        return error

    lacks_tokenizer = told(None, tokenizer=None)["text"]
    assert "task asks: its episodes are played in token ids" in lacks_tokenizer
    assert "give --tokenizer" in lacks_tokenizer
    assert "rollout.max_model_len is 9" in told(9)["text"]
