"""From prompts to a batch of experience: one completion a row, in an order of our own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.rollout.base import RolloutBackend, RolloutRequest, RolloutTrajectory
from rolemesh.engine.seeds import derive_seed
from rolemesh.engine.specs import SamplingSpec

Progress = Callable[[str, int, int], None]


class Decoder(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def decode(self, token_ids: Any, **kwargs: Any) -> Any:
        """Text of tokens."""


def sample_experience(
    backend: RolloutBackend,
    prompts: Sequence[Prompt],
    sampling: SamplingSpec,
    *,
    run_seed: int,
    step: int,
    tokenizer: Decoder,
    progress: Progress,
    only: Sequence[int] | None = None,
) -> Experience:
    """Samples `samples_per_prompt` completions a prompt.

    Rows are ordered by prompt, then by sample index, whatever order they finished in. The seed
    of a row derives from (run seed, step, prompt id, sample index); a prompt that stands in the
    slice twice goes on counting its sample index.

    Args:
        backend: draws the tokens.
        prompts: of the whole batch.
        sampling: how to draw.
        run_seed: seed of the run.
        step: of the run.
        tokenizer: makes texts of completions.
        progress: called after each completion.
        only: places of the prompts to sample, ascending; None means all. A row has the same seed
            whether the others are sampled here or elsewhere.

    Returns:
        The columns that RolloutService.Generate promises, B = prompts * samples_per_prompt rows.
    """
    requests: list[RolloutRequest] = []
    sample_indexes: list[int] = []
    seen: Counter[int] = Counter()
    wanted = set(range(len(prompts)) if only is None else only)
    for place, prompt in enumerate(prompts):
        for _ in range(sampling.samples_per_prompt):
            sample_index = seen[prompt.prompt_id]
            seen[prompt.prompt_id] += 1
            if place not in wanted:
                continue
            sample_indexes.append(sample_index)
            requests.append(
                RolloutRequest(
                    row=len(requests),
                    prompt_tokens=prompt.tokens,
                    seed=derive_seed(run_seed, step, prompt.prompt_id, sample_index),
                )
            )
    finished: list[RolloutTrajectory | None] = [None] * len(requests)
    for done, trajectory in enumerate(backend.generate(requests, sampling), start=1):
        finished[trajectory.row] = trajectory
        progress("generate", done, len(requests))
    trajectories = [trajectory for trajectory in finished if trajectory is not None]
    if len(trajectories) != len(requests):
        raise RuntimeError(
            f"the rollout back end finished {len(trajectories)} of {len(requests)} completions"
        )
    rows = [
        prompt
        for place, prompt in enumerate(prompts)
        for _ in range(sampling.samples_per_prompt)
        if place in wanted
    ]
    return _assemble(rows, sample_indexes, trajectories, tokenizer)


def _assemble(
    rows: Sequence[Prompt],
    sample_indexes: Sequence[int],
    trajectories: Sequence[RolloutTrajectory],
    tokenizer: Decoder,
) -> Experience:
    completions = [list(trajectory.completion_tokens) for trajectory in trajectories]
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in completions]

    def per_token(value: Callable[[RolloutTrajectory], Sequence[float]], dtype: torch.dtype) -> Any:
        return Column.ragged(ColumnKind.COMPLETION, [value(t) for t in trajectories], dtype)

    def per_row(values: Sequence[float], dtype: torch.dtype) -> Column:
        return Column(ColumnKind.ROW, torch.tensor(values, dtype=dtype))

    return Experience(
        {
            "tokens": Column.ragged(
                ColumnKind.SEQUENCE,
                [[*row.tokens, *tokens] for row, tokens in zip(rows, completions, strict=True)],
                torch.int64,
            ),
            "prompt_lengths": per_row([len(row.tokens) for row in rows], torch.int64),
            "logprobs": per_token(lambda t: t.logprobs, torch.float32),
            "loss_mask": per_token(lambda t: [1] * len(t.completion_tokens), torch.bool),
            "policy_versions": per_token(lambda t: t.policy_versions, torch.int64),
            "prompt_ids": per_row([row.prompt_id for row in rows], torch.int64),
            "sample_indexes": per_row(sample_indexes, torch.int64),
            "finished": per_row([t.finish_reason == "stop" for t in trajectories], torch.bool),
            "prompt_text": Column.text([row.text for row in rows]),
            "completion_text": Column.text(texts),
            "answer": Column.text([row.answer for row in rows]),
            "metadata": Column.text([row.metadata for row in rows]),
        }
    )


SAMPLING_COLUMNS = ("logprobs", "finished")
"""Columns that `sampling_metrics` reads."""


def sampling_metrics(batch: Experience) -> dict[str, float]:
    """Scalars of a sampled batch: completion lengths in tokens, share that a stop token ended."""
    lengths = batch["logprobs"].lengths().double()
    finished = batch["finished"].values.double()
    return {
        "completion_length/mean": float(lengths.mean()),
        "completion_length/max": float(lengths.max()),
        "completion_length/min": float(lengths.min()),
        "finished_fraction": float(finished.mean()),
        "sampler_logprob/mean": float(batch["logprobs"].values.double().mean()),
    }
