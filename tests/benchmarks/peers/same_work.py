"""The work that both sides get: prompts in each one's form, and one reward function.

Runs in our environment.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any


def sum_prompts(tokenizer: Any, count: int, least_tokens: int) -> list[tuple[str, str, str]]:
    """Question, rendered text and answer of prompts of that many tokens or a few more.

    A sum gets terms until its rendered prompt is long enough.
    """
    draw = random.Random(0)
    found = []
    for _ in range(count):
        terms = [draw.randint(10, 99), draw.randint(10, 99)]
        while True:
            question = f"Step by step: what is {' + '.join(map(str, terms))}?"
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
            )
            if len(tokenizer(text, add_special_tokens=False)["input_ids"]) >= least_tokens:
                break
            terms.append(draw.randint(10, 99))
        found.append((question, text, str(sum(terms))))
    return found


def write_prompts(
    model: Path, count: int, least_tokens: int, *, questions: Path, rendered: Path
) -> list[int]:
    """Writes the questions, as our recipe reads them, and the rendered prompts, for the peer.

    Returns:
        Tokens of each prompt.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    made = sum_prompts(tokenizer, count, least_tokens)
    asked = [json.dumps({"prompt": question, "answer": answer}) for question, _, answer in made]
    texts = [json.dumps({"text": text, "answer": answer}) for _, text, answer in made]
    questions.write_text("\n".join(asked) + "\n")
    rendered.write_text("\n".join(texts) + "\n")
    return [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for _, text, _ in made]


def check_reward() -> None:
    """Ends the benchmark where the peers' reward function is not our source "arithmetic"."""
    from peers.measured_steps import arithmetic_reward

    from rolemesh.engine.experience import Column, Experience
    from rolemesh.engine.rewards.sources import ArithmeticReward
    from rolemesh.engine.specs import ArithmeticRewardSpec

    texts = ["12", " 12\n", "13", "5 + 7 = 12", "12 or 13", "twelve", "", "-12", "12.0"]
    batch = {"completion_text": Column.text(texts), "answer": Column.text(["12"] * len(texts))}
    ours = ArithmeticReward(ArithmeticRewardSpec()).score(Experience(batch), lambda *_: None)
    for text, reward in zip(texts, ours.tolist(), strict=True):
        if abs(reward - arithmetic_reward(text, "12")) > 1e-6:
            raise SystemExit(f"the sides judge {text!r} differently")
