"""Episodes of a generation replica of two ranks: one asks the environment, both get the answer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.rank_processes import RankContext, RankPool
from support.scripted_sampler import AsciiTokenizer, ScriptedBackend, number_prompts

from rolemesh.engine.environments.base import EnvironmentFailedError
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.rollout.episodes.episodes import EpisodeRunner
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.sampling import sample_experience
from rolemesh.engine.specs import PythonEnvironmentSpec, SamplingSpec

OWN = '''
import os
from pathlib import Path
from rolemesh.engine.environments.base import Environment, Observation

class Dice(Environment):
    """Answers with the process that it runs in, and what no other process can know."""

    def __init__(self, log, fails=False):
        self.log, self.fails, self.turns = Path(log), fails, 0

    def reset(self, row):
        return f"{row.text}? "

    def step(self, completion_text):
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\\n")
        self.turns += 1
        if self.fails:
            raise OSError("out of order")
        noise = os.urandom(8).hex()
        return Observation(text=f"[{noise}]", reward=0.1 * self.turns, done=self.turns == 3)
'''


def play(at: RankContext, directory: str, fails: bool) -> Any:
    path = Path(directory)
    layout = HybridLayout(TrainLayout(tp=2), GenerateLayout(tp=2))
    asked: list[list[tuple[int, Sequence[int]]]] = []

    def in_order(requests: Sequence[RolloutRequest]) -> Sequence[RolloutRequest]:
        asked.append([(request.row, list(request.prompt_tokens)) for request in requests])
        return requests[::-1]

    with at.connect(layout) as mesh:
        runner = EpisodeRunner(
            PythonEnvironmentSpec(
                environment=f"{path / 'own.py'}:Dice",
                config={"log": str(path / "log"), "fails": fails},
            ),
            AsciiTokenizer(),
            500,
            group=mesh.generate_tp,
        )
        try:
            batch = sample_experience(
                ScriptedBackend(order=in_order, reason=lambda *_: "stop"),
                number_prompts().slice("train", 0, 3),
                SamplingSpec(max_new_tokens=200),
                run_seed=1,
                step=1,
                tokenizer=AsciiTokenizer(),
                progress=lambda *_: None,
                episodes=runner,
            )
        except EnvironmentFailedError as error:
            return str(error)
    return (
        os.getpid(),
        asked,
        batch["completion_text"].strings(),
        batch["environment_rewards"].values.tolist(),
        batch["loss_mask"].values.tolist(),
    )


def test_a_tool_is_used_once_and_all_ranks_go_on_with_what_it_said(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (first_pid, *first), (second_pid, *second) = rank_pool.run(play, 2, str(tmp_path), False)
    assert first == second
    assert first_pid != second_pid
    users = (tmp_path / "log").read_text().split()
    assert users == [str(first_pid)] * 9, "3 rows of 3 turns"
    _, texts, rewards, _ = first
    assert len({text.split("[")[1] for text in texts}) == 3, "the answers were random"
    assert [round(reward, 6) for reward in rewards] == [0.6] * 3


def test_all_ranks_are_told_that_it_failed(rank_pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    first, second = rank_pool.run(play, 2, str(tmp_path), True)
    assert first == second
    assert "Dice failed for prompt" in first
    assert "OSError('out of order')" in first
