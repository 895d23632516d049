"""AdamW, or Muon and AdamW: a scheduled rate, clipping by the global norm, refusal of NaN."""

from __future__ import annotations

import math

import torch
from torch import nn

from rolemesh.engine.hardware.cpu_threads import threads_for_each
from rolemesh.engine.models.layer_matrices import layer_matrices
from rolemesh.engine.parallel.buckets import buckets
from rolemesh.engine.sleep_memory import SleepMemory
from rolemesh.engine.specs import (
    AdamwStepSpec,
    AnyOptimizerSpec,
    DecaySpec,
    MuonSpec,
    OptimizerSpec,
    ScheduledSpec,
)
from rolemesh.engine.train.optimizers.gradients import Gradients
from rolemesh.engine.train.optimizers.host_moments import MOMENTS, STATE_NAMES, HostMoments
from rolemesh.engine.train.optimizers.muon import Muon, make_muons

_FUSED_DEVICES = ("cpu", "cuda")

OFFLOAD_BYTES = 128 * 2**20
"""Weights that are stepped together where moments live in host memory. The moments of two such
groups are on the device at a time: 4 times as much."""


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


def scheduled_rate(spec: ScheduledSpec, step: int) -> float:
    """Learning rate of an optimizer step, counted from 0, by warm-up and schedule.

    After the warm-up it equals transformers' get_scheduler ("linear" and "cosine", with a minimum
    their "polynomial" of power 1 and "cosine_with_min_lr"): the first step of the decay is at the
    peak, the last one of T a part 1 / (T - warmup_steps) before the minimum. Steps beyond T are at
    the minimum. The warm-up is one step ahead of theirs, see `warmed_up`.

    Raises:
        ValueError: The schedule does not say how long it is.
    """
    peak, schedule = spec.learning_rate, spec.schedule
    if step < spec.warmup_steps or not isinstance(schedule, DecaySpec):
        return warmed_up(peak, step, spec.warmup_steps)
    if schedule.optimizer_steps is None:
        raise ValueError(
            f"optimizer.schedule.type is {schedule.type!r}, but optimizer.schedule.optimizer_steps "
            "is not given, and there is no recipe that says how many a run makes: give it"
        )
    share = (step - spec.warmup_steps) / (schedule.optimizer_steps - spec.warmup_steps)
    low = schedule.min_learning_rate
    return low + (peak - low) * schedule.left(min(1.0, share))


class Optimizer:
    """Steps this rank's part of float32 parameters. Owned by the rank's compute thread.

    By AdamW; or matrices of layers by Muon, and the rest by AdamW. Moments are cut as the
    parameters are. With many ranks all of them step together.

    Invariant: `num_steps` counts the steps whose effect is in the weights.
    """

    def __init__(self, spec: AnyOptimizerSpec, gradients: Gradients) -> None:
        # A schedule without its length is refused here, and not at the first step.
        scheduled_rate(spec, spec.warmup_steps)
        self.spec = spec
        self.num_steps = 0
        self._gradients = gradients
        self._weights = gradients.weights
        weights = list(self._weights.values())
        self._device_type = weights[0].device.type
        self._muons: list[Muon] = []
        rest = weights
        if isinstance(spec, MuonSpec):
            self._muons = make_muons(spec, gradients.rank_model, self._weights)
            matrices = {id(weight) for muon in self._muons for weight in _weights_of(muon)}
            rest = [weight for weight in weights if id(weight) not in matrices]
        # Where moments live in host memory, parameters are stepped in groups, so that the moments
        # of few of them at a time are on the device.
        group_bytes = OFFLOAD_BYTES if self.is_offloaded else sum(w.nbytes for w in weights)
        self._adamws = [self._adamw(list(group)) for group in buckets(rest, max(1, group_bytes))]
        # Muon's first, which is the same order on all ranks, however many groups AdamW has there.
        self._groups: list[torch.optim.Optimizer] = [*self._muons, *self._adamws]
        self._moments = HostMoments(self._groups, weights[0].device) if self.is_offloaded else None
        self._sleep_memory = SleepMemory()

    @property
    def learning_rate(self) -> float:
        """Rate of the next step by the schedule."""
        return scheduled_rate(self.spec, self.num_steps)

    @property
    def is_offloaded(self) -> bool:
        """Whether moments lie in pinned host memory between steps; never on a CPU device."""
        return self.spec.offload and self._device_type == "cuda"

    def step(
        self, learning_rate: float | None = None, adamw: AdamwStepSpec | None = None
    ) -> dict[str, float]:
        """Sums gradients over the ranks, clips, steps, and drops the gradients.

        Args:
            learning_rate: For this step alone; None takes the schedule's.
            adamw: Its other numbers, for this step alone; None takes the spec's.

        Returns:
            grad_norm (before clipping) and learning_rate, equal on all ranks.

        Raises:
            LossNotFiniteError: The gradient is not finite on some rank; it is dropped and no
                weight moves on any.
        """
        rate = self.learning_rate if learning_rate is None else learning_rate
        with threads_for_each(self._weights.values(), torch.device(self._device_type)):
            norm = self._clipped((self.spec if adamw is None else adamw).max_grad_norm)
        for group in self._groups:
            for parameters in group.param_groups:
                parameters["lr"] = rate
        self._put_numbers(adamw)
        if self._moments is not None:
            self._moments.step()
        else:
            for muon in self._muons:
                muon.step()  # which chooses its threads by its own products
            with threads_for_each(self._weights.values(), torch.device(self._device_type)):
                for own in self._adamws:
                    own.step()
        self._gradients.drop()
        self.num_steps += 1
        return {"grad_norm": norm, "learning_rate": rate}

    def check(self, adamw: AdamwStepSpec | None) -> None:
        """Raises ValueError where numbers of AdamW are given, and Muon steps the matrices."""
        if adamw is not None and self._muons:
            raise ValueError(
                "numbers of AdamW are given for a step, but optimizer.type is 'muon': leave them "
                "out, or take type adamw"
            )

    def _put_numbers(self, adamw: AdamwStepSpec | None) -> None:
        """Has the next step of AdamW go by these numbers, or by those of the spec."""
        if self._muons:
            return
        assert isinstance(self.spec, OptimizerSpec)
        numbers = self.spec if adamw is None else adamw
        for group in self._adamws:
            for parameters, decay in zip(
                group.param_groups, (numbers.weight_decay, 0.0), strict=True
            ):
                parameters |= {"betas": numbers.betas, "eps": numbers.eps, "weight_decay": decay}

    def _clipped(self, max_norm: float | None) -> float:
        """Sums gradients over the ranks and clips them to a norm; gives their norm before."""
        self._gradients.gather()
        total_norm, culprits = self._gradients.norm()
        norm = float(total_norm)
        if not math.isfinite(norm):
            self._gradients.drop()
            raise LossNotFiniteError(
                f"gradient norm is {norm} (first in {culprits[:3]}): gradients were dropped, "
                "weights not touched; lower the learning rate or look at the batch"
            )
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(self._weights.values(), max_norm, total_norm)
        return norm

    def move_to(self, device: torch.device) -> int:
        """Moves the moments; the parameters they belong to move with the model. Returns bytes."""
        self._gradients.refresh()
        if self.is_offloaded:
            return 0  # they are on the host already, and each step fetches them
        elsewhere = [
            (state, name)
            for group in self._groups
            for state in group.state.values()
            for name in MOMENTS
            if name in state and state[name].device != device
        ]
        if not elsewhere:
            return 0
        moved = self._sleep_memory.move([state[name] for state, name in elsewhere], device)
        for (state, name), moment in zip(elsewhere, moved, strict=True):
            state[name] = moment
        return sum(moment.nbytes for moment in moved)

    @property
    def orthogonalised(self) -> frozenset[str]:
        """Weights of the whole model that Muon steps, and which have one moment alone."""
        if not self._muons:
            return frozenset()
        return frozenset(layer_matrices(self._gradients.rank_model.model))

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """One of STATE_NAMES by parameter name, float32; this rank's part, not a copy.

        A moment has the shape of the local weight, `step` none. A parameter that never had a
        gradient has none; before the first step no parameter has. What Muon steps has `exp_avg`
        alone, its mean of gradients.
        """
        return {
            weight_name: group.state[weight][name]
            for weight_name, weight in self._weights.items()
            for group in self._groups
            if weight in group.state and name in group.state[weight]
        }

    def restore(self, states: dict[str, dict[str, torch.Tensor]], num_steps: int) -> None:
        """Puts what `state` gave, for all STATE_NAMES, and the step count back."""
        for group in self._groups:
            group.state.clear()
            ids = {id(weight) for weight in _weights_of(group)}
            for weight_name in states["exp_avg"]:
                weight = self._weights[weight_name]
                if id(weight) in ids:
                    group.state[weight] = {
                        name: states[name][weight_name].to(weight.device, copy=True)
                        for name in STATE_NAMES
                        if weight_name in states[name]
                    }
                    if self._moments is not None:
                        self._moments.put(group, weight)
        self.num_steps = num_steps

    def _adamw(self, weights: list[torch.Tensor]) -> torch.optim.AdamW:
        decayed = [weight for weight in weights if weight.dim() >= 2]
        # Norms and biases are vectors: pulling a scale of 1 towards 0 is not a regulariser.
        vectors = [weight for weight in weights if weight.dim() < 2]
        moments = self.spec.adamw if isinstance(self.spec, MuonSpec) else self.spec
        return torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": self.spec.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=self.spec.learning_rate,
            betas=moments.betas,
            eps=moments.eps,
            fused=self._device_type in _FUSED_DEVICES,
        )


def _weights_of(group: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for parameters in group.param_groups for weight in parameters["params"]]
