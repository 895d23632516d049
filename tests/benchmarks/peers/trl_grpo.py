"""TRL's GRPOTrainer on a CPU: one step before, then the measured ones. Prints one JSON line.

Run by ../grpo_against_trl.py in the peers' environment; see README.md.
"""

from __future__ import annotations

import tempfile
from typing import Any

from datasets import Dataset
from measured_steps import NUM_WARMUP_STEPS, StepClock, Work, arithmetic_reward, read_work, report
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

ADAPTER_ALPHA = 32


def adapter_config(rank: int) -> LoraConfig | None:
    """LoRA beside all matrices of the layers, as ours is by default; None for rank 0."""
    if not rank:
        return None
    return LoraConfig(
        r=rank,
        lora_alpha=ADAPTER_ALPHA,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def make_trainer(work: Work, clock: StepClock, folder: str) -> GRPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(work.model, padding_side="left")

    def reward(
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str],
        **_: Any,
    ) -> list[float]:
        rewards = [arithmetic_reward(*row) for row in zip(completions, answer, strict=True)]
        clock.count(
            sum(len(tokenizer(text)["input_ids"]) for text in prompts),
            [len(ids) for ids in completion_ids],
            rewards,
        )
        return rewards

    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=work.is_autocast,
        gradient_checkpointing=False,
        # All rows are sampled together, and make one optimizer step.
        per_device_train_batch_size=work.rows_per_pass,
        gradient_accumulation_steps=work.num_passes,
        num_generations=work.samples,
        max_completion_length=work.new_tokens,
        num_iterations=1,
        temperature=1.0,
        beta=work.kl,
        loss_type="grpo",
        use_vllm=False,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_steps=work.steps + NUM_WARMUP_STEPS,
        shuffle_dataset=False,
        seed=work.seed,
        # Nothing that is not training.
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=work.weights_dtype)
    return GRPOTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": t, "answer": a} for t, a in work.prompts]),
        reward_funcs=reward,
        callbacks=[clock],
        peft_config=adapter_config(work.adapter),
    )


def main() -> None:
    work = read_work(__doc__.splitlines()[0])
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(work, clock, folder).train()
    report("trl.GRPOTrainer", work, clock)


if __name__ == "__main__":
    main()
