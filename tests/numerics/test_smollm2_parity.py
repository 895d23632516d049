"""Sampler and trainer of the real model agree on the log-probs of the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.updates import update_whole
from transformers import AutoTokenizer

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.sampling import sample_experience
from rolemesh.engine.specs import (
    ModelSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    SamplingSpec,
    VllmSpec,
)
from rolemesh.engine.train.trainer import Trainer
from rolemesh.quickstart.smollm2 import write_smollm2

pytestmark = pytest.mark.slow

BOUND = 5e-4
"""Mean abs difference: other kernels sum in another order. The same for bfloat16, which on a CPU
rounds the weights, once and alike on both sides, and no activation."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2") / "model"
    write_smollm2(path)
    return path


def prompts(folder: Path) -> tuple[list[Prompt], object]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    made = []
    for index in range(12):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is {index} + {3 * index + 4}?"}],
            add_generation_prompt=True,
            tokenize=False,
        )
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        made.append(Prompt(prompt_id=index, text=text, tokens=tokens, answer="", metadata="{}"))
    return made, tokenizer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logprobs_agree_after_each_sync_and_a_missed_one_shows(folder, dtype, record_property):
    trainer = Trainer.policy(
        ModelSpec(path=folder, compute_dtype=dtype), OptimizerSpec(learning_rate=2e-5)
    )
    backend = make_backend(VllmSpec(dtype=dtype, max_model_len=128), folder)
    rows, tokenizer = prompts(folder)

    def sample(step: int) -> Experience:
        return sample_experience(
            backend,
            rows,
            SamplingSpec(samples_per_prompt=4, max_new_tokens=16),
            run_seed=1,
            step=step,
            tokenizer=tokenizer,
            progress=lambda stage, done, total: None,
        )

    def difference(batch: Experience) -> float:
        scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"].values
        return float((scored - batch["logprobs"].values).abs().mean())

    try:
        for version in range(3):
            backend.update_weights(trainer.named_weights(), trainer.policy_version)
            batch = sample(version)
            synced = difference(batch)
            record_property(f"mean_abs_difference_{dtype}_v{version}", synced)
            assert synced <= BOUND, f"version {version}"
            advantages = torch.where(batch["logprobs"].values < -1.0, -1.0, 1.0)
            column = Column(ColumnKind.COMPLETION, advantages, batch["logprobs"].offsets)
            update_whole(
                trainer,
                batch | Experience({"advantages": column}),
                PpoPolicyLossSpec(),
                epochs=2,
                mini_batch_rows=24,
                seed=version,
            )
            # The sampler still holds the old weights: on the same tokens it shows.
            missed = difference(batch)
            record_property(f"missed_{dtype}_v{version}", missed)
            assert missed > 3 * synced
            assert missed > BOUND
    finally:
        backend.close()
