"""Reward functions as TRL's trainers take them.

In a recipe: `reward: ["python:examples/reward_function_trl.py:accuracy"]`, or with a weight
`reward: [{source: "python:examples/reward_function_trl.py:brevity", weight: 0.1}]`.
"""

import asyncio
import re


def accuracy(completions, answer, log_metric, **kwargs):
    """1 where the last number of a completion is the data's `answer`, None where there is none."""
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        # Conversational data has messages in place of text.
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        numbers = re.findall(r"-?\d+", text)
        right = bool(numbers) and numbers[-1] == expected
        rewards.append(None if expected is None else float(right))
    log_metric("answered", sum(reward is not None for reward in rewards) / len(rewards))
    return rewards


async def brevity(completion_ids, trainer_state, **kwargs):
    """1 for an empty completion, less for every token; it waits as if it asked another server."""
    await asyncio.sleep(0)
    return [1.0 / (1.0 + len(ids)) for ids in completion_ids]
