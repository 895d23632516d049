"""Reward functions as users of TRL write them: nothing in here knows rolemesh."""

import asyncio
import re


def tagged(completions, **kwargs):
    """1 for thoughts and then an answer, each in its tags; of conversations."""
    contents = [messages[0]["content"] for messages in completions]
    wanted = re.compile(r"<think>.*</think><answer>.*</answer>", re.DOTALL)
    return [1.0 if wanted.fullmatch(content) else 0.0 for content in contents]


def num_tokens(completion_ids, **kwargs):
    """How many tokens were sampled."""
    return [float(len(ids)) for ids in completion_ids]


def sums(prompts, completions, task, **kwargs):
    """One task of several: None says that the function does not apply."""
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task, strict=True):
        rewards.append(float(completion == str(eval_sum(prompt))) if t == "math" else None)
    return rewards


def eval_sum(prompt):
    """Adds the numbers of a prompt such as "2+2="."""
    return sum(int(number) for number in prompt.rstrip("=").split("+"))


async def reporting(prompts, completions, trainer_state, log_extra, log_metric, **kwargs):
    """Waits for somebody else, and reports."""
    await asyncio.sleep(0.01)
    lengths = [len(completion) for completion in completions]
    log_extra("length", lengths)
    log_metric("longest", max(lengths))
    return [trainer_state.global_step + length for length in lengths]


def reward_func(queries, prompts, labels, **kwargs):
    """OpenRLHF's form, with tensors."""
    import torch

    rewards = [
        float(query.startswith(prompt)) for query, prompt in zip(queries, prompts, strict=True)
    ]
    return {
        "rewards": torch.tensor(rewards),
        "scores": torch.tensor(rewards),
        "extra_logs": {"labelled": torch.tensor([float(label is not None) for label in labels])},
    }
