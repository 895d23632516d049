"""One task: has the policy answer its rows, many at once, judges what it says, and tells each row.

Rows are answered by completions, by an agent, or in episodes with an environment.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from rolemesh.engine.data.rows import DataInvalidError, PromptTooLongError
from rolemesh.engine.evaluation.asking import Answered, Asker, EndpointGoneError, UnansweredError
from rolemesh.engine.evaluation.playing import Player
from rolemesh.engine.evaluation.tasks import EvaluatedRow
from rolemesh.engine.granted.user_code import UserCodeError
from rolemesh.engine.images.prompt_images import ImageInvalidError
from rolemesh.engine.specs.evaluation import DrawingSpec, EvaluatedTaskSpec
from rolemesh.services.evaluation.answers import UnscoredError
from rolemesh.services.evaluation.judging import Judge, Judged
from rolemesh.services.reward.outside.base import OutsideRewardError

if TYPE_CHECKING:
    from rolemesh.engine.evaluation.episodes import EpisodePlayer

_TOLD = (
    *(EndpointGoneError, OutsideRewardError),
    *(UserCodeError, DataInvalidError, PromptTooLongError),
)
"""What ends an evaluation, and is told without a traceback."""

Tell = Callable[..., None]
Take = Callable[[Answered], Awaitable[None]]


class Answering(Protocol):
    """Has the policy answer rows."""

    async def answer(self, take: Take) -> None:
        """Answers all rows, and hands over what came of each; raises EndpointGoneError."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task with all that its rows need."""

    spec: EvaluatedTaskSpec
    rows: list[EvaluatedRow]
    judge: Judge | None
    """None: an agent plays the rows, and judges."""


async def score_task(task: Task, answering: Answering, samples: int, tell: Tell) -> None:
    """Scores one task.

    Args:
        task: Which.
        answering: Who answers its rows.
        samples: Answers a row.
        tell: Is told "task" first, then "row" for each answer, and before that "waits" for one
            that is judged together with others.

    Raises:
        EndpointGoneError: The policy answers no more.
        OutsideRewardError: A source of the reward cannot work at all.
        UserCodeError: A user's code cannot be loaded.
    """
    judge = task.judge
    tell(
        "task",
        task=task.spec.name,
        num_prompts=len(task.rows),
        samples=samples,
        full_score=None if judge is None else judge.full_score,
    )
    scoring = _Scoring(task, tell)
    try:
        if judge is not None:
            await judge.open()
        await answering.answer(scoring.take)
        scoring.finish()
    finally:
        if judge is not None:
            await judge.close()


class _Scoring:
    """What has been answered of a task, and scored. Owner: one loop."""

    def __init__(self, task: Task, tell: Tell) -> None:
        self._task = task
        self._tell = tell
        self._waiting: list[tuple[Answered, Judged]] = []
        """Answers that are judged together, in the end."""

    async def take(self, answered: Answered) -> None:
        """Judges an answer and tells of it, or keeps it until all can be judged."""
        judge, completion = self._task.judge, answered.completion
        if completion is None:
            self._told(answered, UnscoredError(answered.why))
            return
        if judge is None:
            self._told(answered, answered.reward)
            return
        row = self._task.rows[answered.at]
        try:
            judged = await judge.begin(
                row.row, answered.prompt, completion.text, answered.reward, row.image_urls()
            )
        except (UnscoredError, ImageInvalidError) as error:
            self._told(answered, UnscoredError(str(error)))
            return
        if judge.judges_together:
            self._waiting.append((answered, judged))
            self._tell("waits", task=self._task.spec.name, num_waiting=len(self._waiting))
        else:
            self._told(answered, *judge.finish([judged]))

    def finish(self) -> None:
        """Judges what is left. This process has nothing else to do meanwhile."""
        if self._task.judge is None:
            return
        # In the order of a run's batch, whatever order they came in.
        self._waiting.sort(key=lambda one: (one[0].at, one[0].sample))
        found = self._task.judge.finish([judged for _, judged in self._waiting])
        for (answered, _), score in zip(self._waiting, found, strict=True):
            self._told(answered, score)

    def _told(self, answered: Answered, score: float | UnscoredError | None) -> None:
        found: dict[str, Any] = {"score": None, "completion": None}
        completion = answered.completion
        if completion is not None:
            found |= {
                "completion": completion.text,
                "finish_reason": completion.finish_reason,
                "num_tokens": completion.num_tokens,
            }
        if isinstance(score, UnscoredError):
            found["why"] = str(score)
        elif score is None or not math.isfinite(score):
            found["why"] = f"the score is {score}, not a finite number"
        else:
            found["score"] = score
        row = self._task.rows[answered.at]
        self._tell(
            "row",
            task=self._task.spec.name,
            row=answered.at,
            key=row.key,
            sample=answered.sample,
            prompt=answered.prompt,
            answer=row.row.answer,
            **found,
        )


class RowByRow:
    """Completions, or trajectories of an agent, as many at once as the endpoint may be asked."""

    def __init__(
        self,
        task: Task,
        asker: Asker,
        player: Player | None,
        drawing: DrawingSpec,
        concurrency: int,
    ) -> None:
        """Prepares.

        Args:
            task: Whose rows are answered.
            asker: Asks for completions, and makes texts of rows.
            player: Has an agent play; None: a row is one completion.
            drawing: How many answers a row has.
            concurrency: Rows at once.
        """
        self._task = task
        self._asker = asker
        self._player = player
        self._samples = drawing.samples
        self._concurrency = concurrency

    async def answer(self, take: Take) -> None:
        """See `Answering`."""
        # Samples of a prompt come together: a server computes what they share once.
        waiting = iter(
            [(at, n) for at in range(len(self._task.rows)) for n in range(self._samples)]
        )

        async def work() -> None:
            for at, sample in waiting:
                await take(await self._answered(at, sample))

        async with _first_error(), asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                group.create_task(work())

    async def _answered(self, at: int, sample: int) -> Answered:
        name, row = self._task.spec.name, self._task.rows[at]
        prompt = self._asker.prompt_of(row)
        found = partial(Answered, at=at, sample=sample, prompt=prompt)
        try:
            if self._player is None:
                return found(completion=await self._asker.ask(name, row, sample))
            played = await self._player.play(name, row, sample, prompt=prompt)
            return found(completion=played.completion, reward=played.score)
        except (UnansweredError, ImageInvalidError) as error:
            return found(why=str(error))


class ByEpisodes:
    """Episodes with an environment, played on a thread of their own, from their begin to the end.

    A user's environment is a process that ends with the thread that began it.
    """

    def __init__(self, task: Task, make: Callable[[], EpisodePlayer], concurrency: int) -> None:
        """Prepares.

        Args:
            task: Whose rows are played.
            make: Makes the player, on that thread.
            concurrency: Answers that are judged at once.
        """
        self._task = task
        self._make = make
        self._concurrency = concurrency

    async def answer(self, take: Take) -> None:
        """See `Answering`."""
        loop, judging = asyncio.get_running_loop(), asyncio.Semaphore(self._concurrency)

        async def judge(answered: Answered) -> None:
            async with judging:
                await take(answered)

        with ThreadPoolExecutor(1, thread_name_prefix="episodes") as thread:

            async def on_thread(work: Callable[..., Any], *given: Any) -> Any:
                return await loop.run_in_executor(thread, work, *given)

            player = await on_thread(self._make)
            episodes = player.play(self._task.rows)
            try:
                # The sampler goes on only inside of `next`: judging must not keep it waiting.
                async with _first_error(), asyncio.TaskGroup() as group:
                    while (answered := await on_thread(next, episodes, None)) is not None:
                        group.create_task(judge(answered))
            finally:
                await on_thread(episodes.close)
                await on_thread(player.close)


@asynccontextmanager
async def _first_error() -> AsyncIterator[None]:
    """The first error of a task group in the place of the group.

    Not by `except*`: Python 3.11.2 puts what is raised there into a group again.
    """
    try:
        yield
    except ExceptionGroup as errors:
        told, others = errors.split(_TOLD)
        if told is None or others is not None:
            raise
        raise told.exceptions[0] from None
