"""Asks a policy and scores its answers: python -m rolemesh.services.evaluation < QUESTION.

QUESTION is an `EvaluationQuestion` in JSON. Prints one JSON object a line as soon as each is known:
"model", "task" with its number of prompts before its rows, "row" for each completion, "waits" for
one that is judged when all are there, and "error" for what ends the evaluation. A row without a
score says why.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolemesh.engine.data.rendering.rendering import ChatTokenizer
from rolemesh.engine.data.rendering.tokenizers import load_light_tokenizer
from rolemesh.engine.evaluation.asking import Asker, EndpointGoneError
from rolemesh.engine.evaluation.playing import Player
from rolemesh.engine.evaluation.tasks import rows_of
from rolemesh.engine.granted.user_code import UserCodeError
from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.engine.specs import images_of_data
from rolemesh.engine.specs.evaluation import EvaluatedTaskSpec, EvaluationQuestion
from rolemesh.services.evaluation.judging import Judge
from rolemesh.services.evaluation.scoring import Answering, ByEpisodes, RowByRow, Task, score_task
from rolemesh.services.reward.outside.base import OutsideRewardError
from rolemesh.services.runtime.server.config import sandbox_mode

if TYPE_CHECKING:
    from rolemesh.engine.evaluation.episodes import EpisodePlayer


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


async def _evaluate(question: EvaluationQuestion) -> None:
    asked = question.asked
    for spec in question.tasks:
        _check_tokenizer(spec, has_tokenizer=asked.tokenizer is not None)
    if any(spec.has_model or spec.environment is not None for spec in question.tasks):
        # Before a tokenizer, which would be loaded without it: then there are no models here.
        importlib.import_module("torch")
    tokenizer = _tokenizer(asked.tokenizer)
    folder = asked.tokenizer or question.data_tokenizer
    measuring = tokenizer or _tokenizer(folder)
    # All faults of tasks show before the first row is asked.
    tasks = [
        Task(
            spec, rows_of(spec, measuring, folder), None if spec.agent is not None else Judge(spec)
        )
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
            player = None
            if task.spec.agent is not None:
                player = Player(
                    task.spec.agent,
                    asked,
                    question.drawing,
                    model=model,
                    key=key,
                    sandbox=find_sandbox(sandbox_mode(os.environ)),
                    tokenizer=tokenizer,
                )
            answering: Answering = RowByRow(
                task, asker, player, question.drawing, asked.concurrency
            )
            if task.spec.environment is not None:
                longest = task.spec.max_model_len or await asker.longest_sequence()
                make = _episode_player(task, question, model, longest, tokenizer)
                answering = ByEpisodes(task, make, asked.concurrency)
            try:
                await score_task(task, answering, question.drawing.samples, _tell)
            finally:
                if player is not None:
                    await player.close()
    finally:
        await asker.close()


def _check_tokenizer(task: EvaluatedTaskSpec, *, has_tokenizer: bool) -> None:
    """Refuses tasks that need prompts as the policy sees them, where they cannot be made."""
    if has_tokenizer and task.agent is None and images_of_data(task.data):
        raise ValueError(
            f"task {task.name}: its data has images, and prompts are sent as token ids here, which "
            "show none: serve the policy (rolemesh serve-policy), and name it by --url without "
            "--tokenizer"
        )
    if has_tokenizer or not (task.has_model or task.environment is not None):
        return
    why = (
        "its episodes are played in token ids"
        if task.environment is not None
        else "the classifier of its reward reads prompts as the policy's template renders them"
    )
    raise ValueError(
        f"task {task.name}: {why}, and the policy's tokenizer is not known here: give --tokenizer "
        "the folder of the policy's model, or name the run or the folder in the place of --url"
    )


def _episode_player(
    task: Task,
    question: EvaluationQuestion,
    model: str,
    longest: int | None,
    tokenizer: ChatTokenizer | None,
) -> Callable[[], EpisodePlayer]:
    # Here: it comes with torch, which other tasks do without.
    from rolemesh.engine.evaluation.episodes import EpisodePlayer

    assert tokenizer is not None
    return partial(
        EpisodePlayer,
        task.spec,
        question.asked,
        question.drawing,
        model=model,
        max_model_len=longest,
        tokenizer=tokenizer,
        sandbox=find_sandbox(sandbox_mode(os.environ)),
    )


def _tokenizer(folder: Path | None) -> ChatTokenizer | None:
    return None if folder is None else load_light_tokenizer(folder)


def _tell(kind: str, **values: Any) -> None:
    print(json.dumps({"type": kind, **values}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
