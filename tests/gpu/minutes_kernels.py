"""Triton's kernels beside torch's operations: values and ms; and FlexAttention of shared prompts.

In a rehearsal Triton's interpreter computes, so that its ms say nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from minutes_tools import (
    IS_REHEARSAL,
    SHAPE,
    Found,
    drop_memory,
    make_trainer,
    median_s,
    needs,
    rows_of,
    seconds_of,
    update,
    use_gpu,
)

Tensors = dict[str, torch.Tensor]
TOKENS = 32 if IS_REHEARSAL else 4096
ROWS = 3 if IS_REHEARSAL else 64
TOLERANCES = {"head in bfloat16": 0.02, "head in float32": 1e-3}
"""Of the norm of each result; 1e-4 for the others. A gradient's factors are rounded to 2^-9."""


def kernels(found: Found) -> None:
    """Head, loss, advantages and layout, each forward and backward by both."""
    needs("triton")
    from support.kernel_cases import kernels as chosen

    device = use_gpu()
    torch.backends.cuda.matmul.allow_tf32 = False
    told: dict[str, Any] = {}
    wrong = []
    for name, work in cases(device).items():
        values, milliseconds = {}, {}
        for choice in ("torch", "triton"):
            with chosen(choice):
                values[choice] = work()
                milliseconds[choice] = round(1e3 * median_s(work), 3)
        errors = {
            what: _error(values["triton"][what], expected)
            for what, expected in values["torch"].items()
        }
        told[name] = {"ms": milliseconds, "errors": errors}
        found["kernels"] = told
        # NaN is within no tolerance.
        if not all(error <= TOLERANCES.get(name, 1e-4) for error in errors.values()):
            wrong.append(name)
        values.clear()
    if wrong:
        raise RuntimeError(f"the kernels give other values than torch: {', '.join(wrong)}")


def _error(given: torch.Tensor, expected: torch.Tensor) -> float:
    """Difference as a part of the norm."""
    difference = (given.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def cases(device: torch.device) -> dict[str, Callable[[], Tensors]]:
    """What is computed, in the sizes of the model; inputs are made once."""
    from support.kernel_cases import estimated, lost

    from rolemesh.engine.specs import PpoPolicyLossSpec

    lengths = tuple(TOKENS // ROWS + 7 * (row % 3) for row in range(ROWS))
    spec = PpoPolicyLossSpec(clip_low=0.1, clip_high=0.35)
    return {
        "head in bfloat16": head(device, torch.bfloat16),
        "head in float32": head(device, torch.float32),
        # These make their inputs on the CPU each time: both ways alike.
        "policy loss": lambda: lost(device.type, spec, lengths),
        "advantages": lambda: estimated(device.type, lengths, torch.float64, 1.0, 0.95),
    }


def head(device: torch.device, compute_dtype: torch.dtype) -> Callable[[], Tensors]:
    """Log-probs and entropy of random states, and their gradients."""
    from rolemesh.engine.models.vocabulary.logprobs import token_logprobs

    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, SHAPE.hidden, device=device).requires_grad_()
    vocabulary = (
        0.02 * torch.randn(SHAPE.vocabulary, SHAPE.hidden, device=device)
    ).requires_grad_()
    targets = torch.randint(SHAPE.vocabulary, (TOKENS,), device=device)
    weights = torch.randn(TOKENS, device=device)

    def compute() -> Tensors:
        hidden.grad = vocabulary.grad = None
        logprobs, entropy = token_logprobs(
            hidden, vocabulary, targets, compute_dtype=compute_dtype, with_entropy=True
        )
        assert entropy is not None
        (weights @ logprobs + 0.01 * entropy.sum()).backward()  # type: ignore[no-untyped-call]
        assert hidden.grad is not None
        assert vocabulary.grad is not None
        return {
            "logprobs": logprobs.detach(),
            "entropy": entropy.detach(),
            "gradient of hidden": hidden.grad,
            "gradient of vocabulary": vocabulary.grad,
        }

    return compute


def flex(found: Found) -> None:
    """Updates of groups with long prompts: FlexAttention, blocks laid out, and nothing shared.

    `first_s` holds what is compiled; the second batch has other sizes, which must compile nothing.
    """
    needs("triton")
    from support.kernel_cases import kernels as chosen

    rows, mean = (4, 16) if IS_REHEARSAL else (16, SHAPE.tokens // 16)
    batches = [
        rows_of(
            [mean + more] * rows,
            [mean - 3 * (row % 5) - more for row in range(rows)],
            group=rows // 2,
        )
        for more in (0, 3)
    ]
    ways = {"never": "torch", "laid out": "torch", "flex": "triton"}
    if IS_REHEARSAL:
        found.unrehearsed("flex", "torch has no backward pass of it on a CPU: laid out instead")
    told: dict[str, Any] = {}
    for way, choice in ways.items():
        drop_memory()
        trainer = make_trainer("fast", recompute="none", micro_batch_tokens=SHAPE.tokens)
        if way == "never":
            trainer.model.packing = replace(trainer.model.packing, shares=False)
        with chosen(choice):
            first = [seconds_of(partial(update, trainer, batch)) for batch in batches]
            again_s = median_s(
                partial(update, trainer, batches[0]), times=1 if IS_REHEARSAL else 3, warm_ups=0
            )
            logprobs = trainer.compute_logprobs(batches[0], temperature=1.0)["logprobs"].values
        num_tokens = len(batches[0]["tokens"].values)
        passes = trainer.rank_model.micro_batches(batches[0])
        told[way] = {
            "first_s": round(first[0], 3),
            "other_sizes_s": round(first[1], 3),
            "again_s": round(again_s, 4),
            "tokens_per_s": round(num_tokens / again_s),
            "mean_logprob": float(logprobs.double().mean()),
            "shares": all(one.shares for one in passes),
        }
        found["ways"] = told
        del trainer
    means = [one["mean_logprob"] for one in told.values()]
    # All of them made the same updates, in bfloat16.
    if max(means) - min(means) > 0.005 * abs(means[0]):
        raise RuntimeError(f"the ways do not agree: {told}")
