"""TRL's experimental PPOTrainer on a CPU: one step before, then the measured ones.

Prints one JSON line. Run by ../ppo_against_trl.py in the peers' environment; see README.md.
"""

from __future__ import annotations

import os
import tempfile
from types import SimpleNamespace

import torch
from datasets import Dataset
from measured_steps import NUM_WARMUP_STEPS, StepClock, Work, arithmetic_reward, read_work, report
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer


class TokensAsStates(torch.nn.Module):
    """A backbone that computes nothing: its hidden states are tokens [B, T], and their mask."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: object
    ) -> SimpleNamespace:
        return SimpleNamespace(hidden_states=[torch.stack((input_ids, attention_mask.long()), -1)])


class FunctionReward(torch.nn.Module):
    """The reward function in the form of the model that PPOTrainer asks for."""

    base_model_prefix = "backbone"

    def __init__(self, work: Work, tokenizer: PreTrainedTokenizerBase, clock: StepClock) -> None:
        super().__init__()
        self.backbone = TokensAsStates()
        self._tokenizer = tokenizer
        self._clock = clock
        prompts = [(tokenizer(text)["input_ids"], answer) for text, answer in work.prompts]
        self._answers = {tuple(tokens): answer for tokens, answer in prompts}
        # Every step takes every prompt, so every batch is padded to the longest.
        self._context = max(len(tokens) for tokens, _ in prompts)

    def score(self, states: torch.Tensor) -> torch.Tensor:
        """The reward of each row [B, T, 1], the same at each position."""
        tokens, is_token = states[..., 0], states[..., 1].bool()
        lengths, rewards, num_prompt_tokens = [], [], 0
        for row, mask in zip(tokens, is_token, strict=True):
            prompt = row[: self._context][mask[: self._context]].tolist()
            completion = row[self._context :][mask[self._context :]].tolist()
            text = self._tokenizer.decode(completion, skip_special_tokens=True)
            rewards.append(arithmetic_reward(text, self._answers[tuple(prompt)]))
            lengths.append(len(completion))
            num_prompt_tokens += len(prompt)
        self._clock.count(num_prompt_tokens, lengths, rewards)
        return torch.tensor(rewards)[:, None, None].expand(*tokens.shape, 1)


def tokenizer_of(work: Work) -> PreTrainedTokenizerBase:
    """The model's tokenizer with a pad token of its own.

    PPOTrainer finds padding by the token's id: where that is also the end of a turn, it would mask
    turns of the prompt.
    """
    tokenizer = AutoTokenizer.from_pretrained(work.model, padding_side="left")
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = tokenizer.unk_token
    used = {token for text, _ in work.prompts for token in tokenizer(text)["input_ids"]}
    if tokenizer.pad_token_id in used | {tokenizer.eos_token_id, None}:
        raise SystemExit(f"{work.model}: its tokenizer has no special token to pad with")
    return tokenizer


def make_trainer(work: Work, clock: StepClock, folder: str) -> PPOTrainer:
    if work.is_autocast:
        # PPOTrainer makes its Accelerator without the precision of its config.
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    tokenizer = tokenizer_of(work)
    config = PPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=work.is_autocast,
        gradient_checkpointing=False,
        # All rows are sampled together, and make one optimizer step.
        per_device_train_batch_size=work.rows_per_pass,
        gradient_accumulation_steps=work.num_passes,
        num_mini_batches=1,
        num_ppo_epochs=1,
        local_rollout_forward_batch_size=work.num_rows,
        total_episodes=work.num_rows * (work.steps + NUM_WARMUP_STEPS),
        response_length=work.new_tokens,
        stop_token="eos",
        temperature=1.0,
        kl_coef=work.kl,
        gamma=1.0,
        lam=0.95,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        num_sample_generations=0,
        seed=work.seed,
        # Nothing that is not training.
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )

    def policy() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(work.model, dtype=work.weights_dtype)

    critic = AutoModelForSequenceClassification.from_pretrained(
        work.model, num_labels=1, dtype=work.weights_dtype
    )
    rows = [tokenizer(text)["input_ids"] for text, _ in work.prompts for _ in range(work.samples)]
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy(),
        ref_model=policy(),
        reward_model=FunctionReward(work, tokenizer, clock),
        value_model=critic,
        train_dataset=Dataset.from_list([{"input_ids": tokens} for tokens in rows]),
        callbacks=[clock],
    )
    wanted = "bf16" if work.is_autocast else "no"
    if trainer.accelerator.mixed_precision != wanted:
        raise SystemExit(f"PPOTrainer computes in {trainer.accelerator.mixed_precision}")
    return trainer


def main() -> None:
    work = read_work(__doc__.splitlines()[0])
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(work, clock, folder).train()
    report("trl.experimental.ppo.PPOTrainer", work, clock)


if __name__ == "__main__":
    main()
