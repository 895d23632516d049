"""Tests that docs/environments.md shows what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter
from support.scripted_sampler import AsciiTokenizer, ScriptedBackend

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.experience import Experience
from rolemesh.engine.rollout.episodes import EpisodeRunner
from rolemesh.engine.rollout.sampling import sample_experience
from rolemesh.engine.specs import (
    CalculatorEnvironmentSpec,
    DataSpec,
    EnvironmentSpec,
    RewardSourceSpec,
    SamplingSpec,
)

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def play(spec: EnvironmentSpec, prompt: str, answer: str, turns: list[str]) -> Experience:
    said = iter(turns)
    return sample_experience(
        ScriptedBackend(lambda _: [ord(c) for c in next(said)], reason=lambda *_: "stop"),
        [Prompt(prompt_id=0, text=prompt, tokens=[*map(ord, prompt)], answer=answer, metadata="")],
        SamplingSpec(max_new_tokens=200),
        run_seed=0,
        step=0,
        tokenizer=AsciiTokenizer(),
        progress=lambda *_: None,
        episodes=EpisodeRunner(spec, AsciiTokenizer(), 400),
    )


def test_the_environment_on_the_page_does_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "games").mkdir()
    (code,) = blocks("python")
    (tmp_path / "games" / "guess.py").write_text(code)
    section = yaml.safe_load(blocks("yaml")[1])["actor"]["environment"]
    spec: Any = TypeAdapter(EnvironmentSpec).validate_python(section)
    batch = play(spec, "Guess:", "7", [" 3!", " 9! or so", " 7!"])
    (expected,) = blocks("text")
    assert batch["completion_text"].strings() == [expected.rstrip("\n")]
    assert "and the reward 0.8" in PAGE
    assert batch["environment_rewards"].values.tolist() == [pytest.approx(0.8)]


def test_the_table_of_masks_is_that_of_the_calculator() -> None:
    rows = re.findall(r"^\| `(.+?)` \| ([01]) \| (0|as drawn) \|$", PAGE, flags=re.MULTILINE)
    assert len(rows) == 3
    sampled = [text for text, mask, _ in rows if mask == "1"]
    batch = play(CalculatorEnvironmentSpec(), "Q:", "91", sampled)
    assert batch["completion_text"].strings() == ["".join(text for text, *_ in rows)]
    mask = [int(mask) for text, mask, _ in rows for _ in text]
    assert batch["loss_mask"].values.int().tolist() == mask
    assert (batch["logprobs"].values != 0).int().tolist() == mask
    assert batch["environment_rewards"].values.tolist() == [1.0]


def test_the_sections_of_the_page_are_valid() -> None:
    recipe = yaml.safe_load(blocks("yaml")[0])
    TypeAdapter(DataSpec).validate_python(recipe["actor"]["data"])
    environment: Any = TypeAdapter(EnvironmentSpec).validate_python(recipe["actor"]["environment"])
    assert environment == CalculatorEnvironmentSpec(max_observation_tokens=32)
    TypeAdapter(RewardSourceSpec).validate_python(recipe["reward"]["source"])
