"""SmolLM2 learns sums by Tinker's SDK: tinker_learning.py WHAT FOLDER prints its progress as JSON.

FOLDER is that of the model, for its tokenizer.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import tinker
from tinker import types
from tinker_recorder import base_of, datum, prompt, recorded, weighed
from tokenizers import Tokenizer

RATE = types.AdamParams(learning_rate=5e-4)
SUPERVISED_STEPS = 8
STEPS, PROMPTS, SAMPLES = 5, 12, 8


def supervised(service: Any, tokenizer: Any) -> dict[str, Any]:
    """Answers that are given."""
    client = service.create_lora_training_client(base_model=base_of(service), rank=8, seed=1)
    data = []
    for a, b in _sums(random.Random(2), 24):
        begin = _begin(tokenizer, a, b)
        answer = tokenizer.encode(f" {a + b}<|im_end|>", add_special_tokens=False).ids
        weights = [0.0] * (len(begin) - 1) + [1.0] * len(answer)
        data.append(datum([*begin, *answer], weights=weights))
    count = sum(sum(one.loss_fn_inputs["weights"].data) for one in data)
    losses = []
    for _ in range(SUPERVISED_STEPS):
        gradient = client.forward_backward(data, "cross_entropy")
        client.optim_step(RATE).result()
        losses.append(gradient.result().metrics["loss:sum"] / count)
    return {"losses": losses, "num_tokens": count}


def reinforced(service: Any, tokenizer: Any) -> dict[str, Any]:
    """Answers of its own, judged here: 1 for the number alone, else 0."""
    client = service.create_lora_training_client(base_model=base_of(service), rank=8, seed=1)
    drawn = random.Random(1)
    params = types.SamplingParams(max_tokens=8, temperature=1.0)
    rewards = []
    for step in range(STEPS):
        sampler = client.save_weights_and_get_sampling_client()
        sums = _sums(drawn, PROMPTS)
        begins = [_begin(tokenizer, a, b) for a, b in sums]
        futures = [sampler.sample(prompt(one), SAMPLES, params) for one in begins]
        data, judged = [], []
        for (a, b), begin, future in zip(sums, begins, futures, strict=True):
            group = future.result().sequences
            scores = [float(_text(tokenizer, one.tokens) == str(a + b)) for one in group]
            judged += scores
            mean = sum(scores) / len(scores)
            for sequence, score in zip(group, scores, strict=True):
                if score != mean:
                    data.append(weighed(begin, sequence, (score - mean) / PROMPTS / SAMPLES))
        rewards.append(sum(judged) / len(judged))
        if data and step < STEPS - 1:
            client.forward_backward(data, "importance_sampling")
            client.optim_step(RATE).result()
    return {"rewards": rewards, "num_answers": PROMPTS * SAMPLES}


def _sums(drawn: random.Random, count: int) -> list[tuple[int, int]]:
    return [(drawn.randrange(10), drawn.randrange(10)) for _ in range(count)]


def _begin(tokenizer: Any, a: int, b: int) -> list[int]:
    """The turns before the answer, whose own begins with the sum."""
    turns = (
        ("system", "Answer with only the number."),
        ("user", f"{a} + {b} = ?"),
    )
    text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)
    begun = f"{text}<|im_start|>assistant\n{a} + {b} ="
    ids: list[int] = tokenizer.encode(begun, add_special_tokens=False).ids
    return ids


def _text(tokenizer: Any, tokens: Any) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()


if __name__ == "__main__":
    what = {"supervised": supervised, "reinforced": reinforced}[sys.argv[1]]
    read = Tokenizer.from_file(f"{sys.argv[2]}/tokenizer.json")
    with tinker.ServiceClient() as client, recorded() as called:
        saw = what(client, read)
    print(json.dumps({**saw, "called": sorted(called)}))
