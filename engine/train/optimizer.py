"""AdamW with warm-up, clipping by the global norm, and a refusal of what is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from rolemesh.engine.specs import OptimizerSpec

_FUSED_DEVICES = ("cpu", "cuda")
STATE_NAMES = ("exp_avg", "exp_avg_sq", "step")
"""What torch's AdamW keeps for each parameter: two moments, and its own count of steps."""


class LossNotFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite. Gradients were dropped, weights not touched."""


class NoGradientError(RuntimeError):
    """An optimizer step was asked for, but no gradient was accumulated."""


def warmed_up(peak: float, step: int, warmup_steps: int) -> float:
    """Learning rate of an optimizer step, counted from 0.

    Linear: step k of a warm-up over W steps takes peak * (k + 1) / W, so that no step is spent
    at rate 0 and step W - 1 is the first at the peak.
    """
    return peak * min(1.0, (step + 1) / warmup_steps) if warmup_steps else peak


class Optimizer:
    """AdamW over float32 parameters. Owned by the rank's compute thread.

    Invariant: `num_steps` counts the steps whose effect is in the weights.
    """

    def __init__(self, spec: OptimizerSpec, weights: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.spec = spec
        self.num_steps = 0
        self._weights = {name: weight for name, weight in weights if weight.requires_grad}
        decayed = [weight for weight in self._weights.values() if weight.dim() >= 2]
        # Norms and biases are vectors: pulling a scale of 1 towards 0 is not a regulariser.
        vectors = [weight for weight in self._weights.values() if weight.dim() < 2]
        device_type = next(iter(self._weights.values())).device.type
        self._adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": spec.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=spec.learning_rate,
            betas=spec.betas,
            eps=spec.eps,
            fused=device_type in _FUSED_DEVICES,
        )

    @property
    def learning_rate(self) -> float:
        """Rate of the next step by the schedule."""
        return warmed_up(self.spec.learning_rate, self.num_steps, self.spec.warmup_steps)

    def step(self, learning_rate: float | None = None) -> dict[str, float]:
        """Clips, steps, and drops the gradients.

        Args:
            learning_rate: for this step alone; None takes the schedule's.

        Returns:
            grad_norm (before clipping) and learning_rate.

        Raises:
            LossNotFiniteError: the gradient is not finite; it is dropped and no weight moves.
        """
        rate = self.learning_rate if learning_rate is None else learning_rate
        weights = list(self._weights.values())
        total_norm = nn.utils.get_total_norm(
            [weight.grad for weight in weights if weight.grad is not None]
        )
        norm = float(total_norm)
        if not math.isfinite(norm):
            culprits = [
                name
                for name, weight in self._weights.items()
                if weight.grad is not None and not bool(weight.grad.isfinite().all())
            ]
            self.drop_gradients()
            raise LossNotFiniteError(
                f"gradient norm is {norm} (first in {culprits[:3]}): gradients were dropped, "
                "weights not touched; lower the learning rate or look at the batch"
            )
        nn.utils.clip_grads_with_norm_(weights, self.spec.max_grad_norm, total_norm)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.drop_gradients()
        self.num_steps += 1
        return {"grad_norm": norm, "learning_rate": rate}

    def drop_gradients(self) -> None:
        """Forgets accumulated gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def move_to(self, device: torch.device) -> int:
        """Moves the moments; the parameters they belong to move with the model. Returns bytes."""
        moved = 0
        for state in self._adamw.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state and state[name].device != device:
                    moved += state[name].nbytes
                    state[name] = state[name].to(device)
        return moved

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """One of STATE_NAMES by parameter name, float32.

        A parameter that never had a gradient has none; before the first step nobody has.
        """
        return {
            weight_name: self._adamw.state[weight][name]
            for weight_name, weight in self._weights.items()
            if weight in self._adamw.state
        }

    def restore(self, states: dict[str, dict[str, torch.Tensor]], num_steps: int) -> None:
        """Puts what `state` gave, for all STATE_NAMES, and the step count back."""
        self._adamw.state.clear()
        for weight_name in states["exp_avg"]:
            weight = self._weights[weight_name]
            self._adamw.state[weight] = {
                name: states[name][weight_name].to(weight.device, copy=True) for name in STATE_NAMES
            }
        self.num_steps = num_steps
