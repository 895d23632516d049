"""Asks a policy and scores its answers: python -m rolemesh.services.evaluation < QUESTION.

QUESTION is an `EvaluationQuestion` in JSON. Prints one JSON object a line as soon as each is known:
"model", "task" with its number of prompts before its rows, "row" for each completion, and "error"
for what ends the evaluation. A row without a score says why.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolemesh.engine.data.rendering import ChatTokenizer
from rolemesh.engine.data.tokenizers import load_light_tokenizer
from rolemesh.engine.evaluation.asking import Asker, EndpointGoneError, UnansweredError
from rolemesh.engine.evaluation.playing import Player
from rolemesh.engine.evaluation.tasks import EvaluatedRow, rows_of
from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.engine.specs.evaluation import EvaluatedTaskSpec, EvaluationQuestion
from rolemesh.engine.user_code import UserCodeError
from rolemesh.services.evaluation.judging import Judge, UnscoredError
from rolemesh.services.reward.outside.base import OutsideRewardError
from rolemesh.services.runtime.server.config import sandbox_mode


def main() -> int:
    """Reads the question, asks, scores, and prints."""
    question = EvaluationQuestion.model_validate_json(sys.stdin.read())
    try:
        asyncio.run(_evaluate(question))
    except ModuleNotFoundError as error:
        _tell("error", text=f"{error.name} is not installed here", is_input=True)
    except (ValueError, UserCodeError) as error:
        _tell("error", text=str(error), is_input=True)
    except (EndpointGoneError, OutsideRewardError) as error:
        _tell("error", text=str(error), is_input=False)
    return 0


@dataclass(frozen=True, slots=True)
class _Task:
    """A task with all that its rows need."""

    spec: EvaluatedTaskSpec
    rows: list[EvaluatedRow]
    judge: Judge | None
    """None: an agent plays the rows, and judges."""


async def _evaluate(question: EvaluationQuestion) -> None:
    asked = question.asked
    tokenizer = _tokenizer(asked.tokenizer)
    measuring = tokenizer or _tokenizer(question.data_tokenizer)
    # All faults of tasks show before the first row is asked.
    tasks = [
        _Task(spec, rows_of(spec, measuring), None if spec.agent is not None else Judge(spec))
        for spec in question.tasks
    ]
    key = None if asked.key_variable is None else os.environ.get(asked.key_variable, "")
    if key == "":
        raise ValueError(f"--key-variable: {asked.key_variable} is not set, or empty")
    asker = Asker(asked, question.drawing, key=key, tokenizer=tokenizer)
    try:
        model = await asker.open()
        _tell("model", model=model)
        for task in tasks:
            if task.spec.agent is None:
                await _one_task(task, asker, None, question)
                continue
            player = Player(
                task.spec.agent,
                asked,
                question.drawing,
                model=model,
                key=key,
                sandbox=find_sandbox(sandbox_mode(os.environ)),
                tokenizer=tokenizer,
            )
            try:
                await _one_task(task, asker, player, question)
            finally:
                await player.close()
    finally:
        await asker.close()


def _tokenizer(folder: Path | None) -> ChatTokenizer | None:
    return None if folder is None else load_light_tokenizer(folder)


async def _one_task(
    task: _Task, asker: Asker, player: Player | None, question: EvaluationQuestion
) -> None:
    samples = question.drawing.samples
    _tell(
        "task",
        task=task.spec.name,
        num_prompts=len(task.rows),
        samples=samples,
        full_score=None if task.judge is None else task.judge.full_score,
    )
    # Samples of a prompt come together: a server computes what they share once.
    waiting = iter([(at, n) for at in range(len(task.rows)) for n in range(samples)])
    try:
        if task.judge is not None:
            await task.judge.open()
        async with asyncio.TaskGroup() as group:
            for _ in range(question.asked.concurrency):
                group.create_task(_work(task, asker, player, waiting))
    except* EndpointGoneError as errors:
        raise errors.exceptions[0] from None
    except* (OutsideRewardError, UserCodeError) as errors:
        raise errors.exceptions[0] from None
    finally:
        if task.judge is not None:
            await task.judge.close()


async def _work(
    task: _Task, asker: Asker, player: Player | None, waiting: Iterator[tuple[int, int]]
) -> None:
    """Asks and scores one completion after another, until none is left."""
    for at, sample in waiting:
        row = task.rows[at]
        prompt = asker.prompt_of(row)
        found: dict[str, Any] = {"score": None, "completion": None}
        try:
            score: float | None = None
            if player is not None:
                played = await player.play(task.spec.name, row, sample, number=at, prompt=prompt)
                completion, score = played.completion, played.score
            else:
                completion = await asker.ask(task.spec.name, row, sample)
            found |= {
                "completion": completion.text,
                "finish_reason": completion.finish_reason,
                "num_tokens": completion.num_tokens,
            }
            if task.judge is not None:
                score = await task.judge.score(row.row, prompt, completion.text)
            if score is None or not math.isfinite(score):
                raise UnscoredError(f"the score is {score}, not a finite number")
            found["score"] = score
        except (UnansweredError, UnscoredError) as error:
            found["why"] = str(error)
        _tell(
            "row",
            task=task.spec.name,
            row=at,
            key=row.key,
            sample=sample,
            prompt=prompt,
            answer=row.row.answer,
            **found,
        )


def _tell(kind: str, **values: Any) -> None:
    print(json.dumps({"type": kind, **values}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
