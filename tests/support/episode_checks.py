"""Checks of episodes that every rollout back end must pass: turns end where they are told to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.rollout_checks import make_requests, score
from support.tiny_models import tiny_tokenizer
from transformers import PreTrainedModel

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.episodes.episodes import EpisodeRunner
from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory
from rolemesh.engine.rollout.sampling import sample_experience
from rolemesh.engine.specs import PythonEnvironmentSpec, SamplingSpec

OWN = '''
from rolemesh.engine.environments.base import Environment, Observation

class Nods(Environment):
    """Nods at each "e" that it hears, three times."""

    stop = ("e",)

    def __init__(self):
        self.turns = 0

    def reset(self, row):
        return " hello"

    def step(self, completion_text):
        self.turns += 1
        return Observation(text=" mhm ", reward=completion_text.count("e"), done=self.turns == 3)
'''


def assert_turns_end_when_told(backend: RolloutBackend) -> None:
    """A watched completion is the first part of the one that nobody watches, bit for bit."""

    def second_multiple(tokens: Sequence[int]) -> bool:
        return sum(token % 4 == 0 for token in tokens) >= 2

    sampling = SamplingSpec(max_new_tokens=40, temperature=0.8)
    requests = make_requests(12)
    plain = {t.row: t for t in backend.generate(requests, sampling)}
    # Some rows of the batch are watched, some bounded, some both.
    watched = {
        t.row: t
        for t in backend.generate(
            [
                replace(
                    request,
                    is_complete=second_multiple if request.row % 3 else None,
                    max_new_tokens=3 if request.row % 2 else None,
                )
                for request in requests
            ],
            sampling,
        )
    }
    endings = set()
    for row, whole in plain.items():
        tokens = list(whole.completion_tokens)
        lengths = range(1, len(tokens) + 1)
        told = [n for n in lengths if row % 3 and second_multiple(tokens[:n])]
        bound = 3 if row % 2 else len(tokens)
        length = min([*told, bound, len(tokens)])
        got = watched[row]
        assert list(got.completion_tokens) == tokens[:length]
        assert torch.allclose(
            torch.tensor(got.logprobs), torch.tensor(whole.logprobs[:length]), atol=1e-5, rtol=0
        )
        assert len(got.policy_versions) == length
        is_told = bool(told) and told[0] == length
        expected = "stop" if is_told else "length" if length < len(tokens) else whole.finish_reason
        assert got.finish_reason == expected
        endings.add((is_told, length < len(tokens), expected))
    assert (True, True, "stop") in endings, "some end early because they are told to"
    assert (False, True, "length") in endings, "some are bounded"


class _Scripted:
    """Gives requests at the moments that it is told: one list each time it is asked."""

    def __init__(self, script: Sequence[Sequence[RolloutRequest]]) -> None:
        self._script = list(script)
        self.idle: list[bool] = []

    def take(self, *, is_idle: bool) -> Sequence[RolloutRequest] | None:
        self.idle.append(is_idle)
        return self._script.pop(0) if self._script else None


def assert_requests_may_come_later(backend: RolloutBackend, tolerance: float) -> None:
    """Rows that join others between two steps, or come after them, draw what they draw alone."""
    sampling = SamplingSpec(max_new_tokens=12)
    requests = make_requests(9)
    expected = {t.row: t for t in backend.generate(requests, sampling)}
    script = [[], requests[2:4], [], requests[4:8], *([[]] * 80), requests[8:]]
    for first in (requests[:2], []):
        later = _Scripted([requests[:2], *script] if not first else script)
        found = {t.row: t for t in backend.generate(first, sampling, later)}
        assert found.keys() == expected.keys()
        for row, trajectory in found.items():
            assert trajectory.completion_tokens == expected[row].completion_tokens, row
            assert trajectory.logprobs == pytest.approx(expected[row].logprobs, abs=tolerance)
        # The last one came when all others had long ended.
        assert later.idle.count(True) > 10
    later = _Scripted([[replace(requests[1], prompt_tokens=[])]])
    with pytest.raises(ValueError, match="prompt of row 1 is empty"):
        list(backend.generate(requests[:1], sampling, later))
    assert len(list(backend.generate(requests[:1], sampling))) == 1


def assert_episodes_score_as_a_full_forward(
    backend: RolloutBackend, model: PreTrainedModel, directory: Path, tolerance: float
) -> None:
    """Log-probs of sampled tokens are the model's, given all before them, tool output included."""
    tokenizer = tiny_tokenizer()
    path = directory / "own.py"
    path.write_text(OWN)
    runner = EpisodeRunner(
        PythonEnvironmentSpec(environment=f"{path}:Nods"), tokenizer, max_model_len=64
    )
    prompts = [
        Prompt(
            prompt_id=request.row,
            text=tokenizer.decode(request.prompt_tokens),
            tokens=list(request.prompt_tokens),
            answer="",
            metadata="{}",
        )
        for request in make_requests(6)
    ]
    batch = sample_experience(
        backend,
        prompts,
        SamplingSpec(samples_per_prompt=2, max_new_tokens=60),
        run_seed=5,
        step=0,
        tokenizer=tokenizer,
        progress=lambda *_: None,
        episodes=runner,
    )
    (hello, mhm) = (tokenizer(text)["input_ids"] for text in (" hello", " mhm "))
    num_turns = []
    for row in range(len(batch)):
        one = batch.slice(row, row + 1)
        length = int(one["prompt_lengths"].values)
        prompt, tokens = one["tokens"].values[:length], one["tokens"].values[length:].tolist()
        mask, logprobs = one["loss_mask"].values.tolist(), one["logprobs"].values
        # Walk over the row: greeting, then turns that end with the first "e", then the nod.
        assert tokens[: len(hello)] == hello
        at, turns, reward = len(hello), 0, 0
        expected = [False] * at
        while at < len(tokens):
            start = at
            while at < len(tokens) and "e" not in tokenizer.decode(tokens[start:at]):
                at += 1
                if at < len(tokens) and not mask[at]:
                    break
            expected += [True] * (at - start)
            reward += tokenizer.decode(tokens[start:at], skip_special_tokens=True).count("e")
            turns += 1
            if at < len(tokens):
                assert tokens[at : at + len(mhm)] == mhm
                expected += [False] * len(mhm)
                at += len(mhm)
        assert mask == expected
        assert 1 <= turns <= 3
        assert float(one["environment_rewards"].values) == reward
        assert len(tokens) <= min(60, 64 - length)
        num_turns.append(turns)
        assert torch.equal(logprobs == 0, ~torch.tensor(mask))
        trajectory = RolloutTrajectory(
            row=0,
            completion_tokens=tokens,
            logprobs=[],
            finish_reason="stop",
            policy_versions=[],
        )
        request = replace(make_requests(1)[0], row=0, prompt_tokens=prompt.tolist())
        scores = score(model, [request], [trajectory])
        differences = (logprobs.double() - scores)[torch.tensor(mask)].abs()
        assert differences.max() < tolerance
    assert 3 in num_turns
    assert batch["environment_rewards"].values.sum() > 0, "some turns end with an e"
