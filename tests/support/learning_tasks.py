"""Tasks with known optima for a tiny model, and the recipes that learn them.

A letter is one token of the tiny tokenizer without merges. Words are upper case, prompts lower, so
that counting letters of a row counts those of its completion.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from support.learning_runs import write_rows
from support.tiny_models import END, tiny_tokenizer, write_tiny_llama
from transformers import AutoModelForCausalLM

LETTERS = string.ascii_uppercase
LIKED = LETTERS[:13]
OTHER = LETTERS[13:]
PROMPTS = "abcdefgh"
WORD_LENGTH = 6
"""Letters of a word, and tokens of a sampled completion."""
VOCAB_SIZE = 260
"""Bytes and special tokens: the fewest that the tiny tokenizer has."""

LETTERS_ENVIRONMENT = '''
"""One turn: each character earns its worth, as a share of the longest completion."""

from rolemesh.engine.environments.base import Environment, Observation


class Letters(Environment):
    def __init__(self, worth, length):
        self._worth = {letter: each for letters, each in worth.items() for letter in letters}
        self._length = length

    def reset(self, row):
        return None

    def step(self, completion_text):
        earned = sum(self._worth.get(character, 0.0) for character in completion_text)
        return Observation(reward=earned / self._length, done=True)
'''


LETTERS_FUNCTION = """
def share(completions, **kwargs):
    return [sum(map(str.isupper, text)) / LENGTH for text in completions]
"""
"""What the environment gives where each letter is worth 1."""


def write_task(folder: Path, seed: int) -> Path:
    """A model, prompts and the environment: what all tasks start from."""
    write_tiny_llama(
        folder / "model",
        seed=seed,
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=1,
    )
    write_rows(folder / "prompts.jsonl", [{"prompt": letter} for letter in PROMPTS])
    (folder / "letters.py").write_text(LETTERS_ENVIRONMENT)
    (folder / "share.py").write_text(f"LENGTH = {WORD_LENGTH}\n{LETTERS_FUNCTION}")
    return folder


def prompt_text(prompt: str) -> str:
    """The prompt as the policy sees it."""
    turns = [{"role": "user", "content": prompt}]
    text = tiny_tokenizer(VOCAB_SIZE).apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return text


@torch.no_grad()
def word_logprobs(folder: Path, rows: list[tuple[str, str]]) -> torch.Tensor:
    """Log-prob of each word and its end after its prompt, by transformers alone: float32 [rows]."""
    tokenizer = tiny_tokenizer(VOCAB_SIZE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = [prompt_text(prompt) + word + END for prompt, word in rows]
    tokens = torch.tensor(tokenizer(texts)["input_ids"])
    logprobs = model(tokens).logits[:, :-1].log_softmax(-1)
    of_tokens = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
    return torch.as_tensor(of_tokens[:, -(WORD_LENGTH + 1) :].sum(-1))


def model_of(folder: Path) -> dict[str, Any]:
    """The model's section of a role."""
    return {"path": str(folder), "compute_dtype": "float32"}


def sampled_recipe(
    task: Path,
    algorithm: Mapping[str, Any],
    *,
    seed: int,
    steps: int,
    worth: Mapping[str, float],
) -> dict[str, Any]:
    """A policy that samples words; `worth` says what each of the letters earns.

    A word of the most worthy letters alone, and of full length, has the greatest reward: their
    worth. Everything else earns less, an early end too.
    """
    model = model_of(task / "model")
    optimizer = {"learning_rate": 3e-3}
    recipe: dict[str, Any] = {
        "run": {
            "name": "words",
            "seed": seed,
            "steps": steps,
            "prompts_per_step": 4,
            "evaluation": {"num_prompts": 0},
        },
        "algorithm": {
            "sampling": {"samples_per_prompt": 8, "max_new_tokens": WORD_LENGTH},
            # Two optimizer steps a step, so that the second one is off-policy.
            "mini_batch_rows": 16,
            **algorithm,
        },
        "actor": {
            "model": model,
            "optimizer": optimizer,
            "rollout": {"type": "hf", "max_model_len": 64},
            "data": {"type": "jsonl", "path": str(task / "prompts.jsonl")},
            "environment": {
                "type": "python",
                "environment": f"{task / 'letters.py'}:Letters",
                "config": {"worth": dict(worth), "length": WORD_LENGTH},
                "max_turns": 1,
            },
        },
        "reward": {"source": {"type": "environment"}},
    }
    if algorithm["type"] in ("ppo", "safe_rlhf", "online_dpo"):
        recipe["reference"] = {"model": model}
    if algorithm["type"] in ("ppo", "safe_rlhf"):
        recipe["critic"] = {"model": model, "optimizer": optimizer}
    return recipe


def judged_by_function(recipe: dict[str, Any], task: Path) -> dict[str, Any]:
    """The same without an environment, whose process imports for most of a second in each run."""
    actor = {name: value for name, value in recipe["actor"].items() if name != "environment"}
    return {**recipe, "actor": actor, "reward": {"source": f"python:{task / 'share.py'}:share"}}


def given_recipe(
    task: Path,
    algorithm: Mapping[str, Any],
    data: Path,
    *,
    seed: int,
    steps: int,
    rows_per_step: int,
) -> dict[str, Any]:
    """A policy, or a reward model, that learns from the rows of a file."""
    model = model_of(task / "model")
    optimizer = {"learning_rate": 3e-3}
    source = {"type": "jsonl", "path": str(data)}
    recipe: dict[str, Any] = {
        "run": {
            "name": "given",
            "seed": seed,
            "steps": steps,
            "prompts_per_step": rows_per_step,
            "evaluation": {"num_prompts": 0},
        },
        "algorithm": {"mini_batch_rows": 16, **algorithm},
    }
    if algorithm["type"] == "reward_model":
        judge = {"type": "classifier", "model": model, "new_head": True}
        return {**recipe, "reward": {"source": judge, "optimizer": optimizer, "data": source}}
    recipe["actor"] = {
        "model": model,
        "optimizer": optimizer,
        "rollout": {"type": "hf", "max_model_len": 64},
        "data": source,
    }
    if algorithm["type"] != "sft":
        recipe["reference"] = {"model": model}
    return recipe


def num_liked(word: str) -> int:
    """How many of its letters are liked."""
    return sum(letter in LIKED for letter in word)


def pairs(seed: int, number: int) -> list[dict[str, str]]:
    """Random words: the one with more liked letters is the chosen one."""
    draw = random.Random(seed)
    found: list[dict[str, str]] = []
    while len(found) < number:
        one, other = _word(draw, LETTERS), _word(draw, LETTERS)
        if num_liked(one) != num_liked(other):
            rejected, chosen = sorted((one, other), key=num_liked)
            found.append({"prompt": draw.choice(PROMPTS), "chosen": chosen, "rejected": rejected})
    return found


def judgements(seed: int, number: int) -> list[dict[str, Any]]:
    """Random words: wanted are those with more liked letters than others."""
    draw = random.Random(seed)
    words = [_word(draw, LETTERS) for _ in range(number)]
    return [
        {
            "prompt": draw.choice(PROMPTS),
            "completion": word,
            "label": num_liked(word) > WORD_LENGTH / 2,
        }
        for word in words
    ]


def demonstrations(seed: int, number: int) -> list[dict[str, str]]:
    """Words of liked letters, each letter as likely as another."""
    draw = random.Random(seed)
    return [
        {"prompt": draw.choice(PROMPTS), "completion": _word(draw, LIKED)} for _ in range(number)
    ]


def _word(draw: random.Random, letters: str) -> str:
    return "".join(draw.choices(letters, k=WORD_LENGTH))
