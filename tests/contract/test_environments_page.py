"""Tests that docs/environments.md shows what happens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter
from support.scripted_sampler import AsciiTokenizer, ScriptedBackend
from support.tiny_models import tiny_tokenizer

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.experience import Experience
from rolemesh.engine.rollout.episodes.episodes import EpisodeRunner
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.rollout.sampling import sample_experience
from rolemesh.engine.specs import (
    CalculatorEnvironmentSpec,
    DataSpec,
    EnvironmentSpec,
    PythonEnvironmentSpec,
    RewardSourceSpec,
    SamplingSpec,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text()
CHAT_EXAMPLE = ROOT / "examples" / "chat_environment.py"


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
    code, _ = blocks("python")
    (tmp_path / "games" / "guess.py").write_text(code)
    section = yaml.safe_load(blocks("yaml")[1])["actor"]["environment"]
    spec: Any = TypeAdapter(EnvironmentSpec).validate_python(section)
    batch = play(spec, "Guess:", "7", [" 3!", " 9! or so", " 7!"])
    expected, _ = blocks("text")
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


def test_the_chat_example_gives_the_conversation_on_the_page() -> None:
    _, step = blocks("python")
    assert step in CHAT_EXAMPLE.read_text()
    _, expected = blocks("text")
    tokenizer = tiny_tokenizer()
    spec = PythonEnvironmentSpec(environment=f"{CHAT_EXAMPLE}:Guess", max_turn_tokens=26)
    answers = iter(
        ["3<|im_end|>", "Well let me think about it aloud, since it is hard", "7<|im_end|>"]
    )

    def script(request: RolloutRequest) -> list[int]:
        tokens: list[int] = tokenizer(next(answers))["input_ids"]
        return tokens[: request.max_new_tokens]

    conversation = [{"role": "user", "content": "Guess."}]
    text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    batch = sample_experience(
        ScriptedBackend(
            script, reason=lambda request, tokens: "length" if len(tokens) == 26 else "stop"
        ),
        [
            Prompt(
                prompt_id=0, text=text, tokens=tokenizer(text)["input_ids"], answer="7", metadata=""
            )
        ],
        SamplingSpec(max_new_tokens=400),
        run_seed=0,
        step=0,
        tokenizer=tokenizer,
        progress=lambda *_: None,
        episodes=EpisodeRunner(spec, tokenizer, 1000),
    )
    prompt_length = int(batch["prompt_lengths"].values)
    tokens = batch["tokens"].values[prompt_length:]
    assert tokenizer.decode(tokens) == expected.rstrip("\n")
    own = batch["loss_mask"].values
    assert tokenizer.decode(tokens[own]) == "3<|im_end|>Well let me think about it aloud7<|im_end|>"
    assert batch["environment_rewards"].values.tolist() == [pytest.approx(0.8)]
