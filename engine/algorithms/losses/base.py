"""Base of the losses; `make_loss` finds the loss of a spec.

The losses are in policy_losses, value_losses and preference_losses, each registered with its spec.

A loss sees one micro-batch and the counts of the whole mini-batch (`LossScale`), and returns its
share: the shares add up, so cutting the batch differently changes no gradient.

Shape letters: N packed completion tokens of the micro-batch, M those of them with loss mask 1.
Only the M are ever read: a masked token has gradient exactly 0, whatever it holds.

Nothing here waits for the device of the outputs: columns and masks lie in host memory, what a loss
needs of them is sent, and its numbers stay on the device until the mini-batch is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch

from rolemesh.engine.algorithms.aggregation import LossScale as LossScale
from rolemesh.engine.algorithms.ragged import completion_values, loss_mask_of, row_values
from rolemesh.engine.experience import Experience
from rolemesh.engine.granted.own_functions import OwnFunctions
from rolemesh.engine.hardware.devices import sent
from rolemesh.engine.specs import OwnFunctionSpec, Spec
from rolemesh.engine.specs.base import PartSpec

S = TypeVar("S", bound=PartSpec)


@dataclass(slots=True)
class ModelOutputs:
    """What a forward pass gives for the completion tokens of a micro-batch, packed."""

    logprobs_N: torch.Tensor | None = None
    """float [N], log-probs of the completion tokens."""
    entropy_N: torch.Tensor | None = None
    """float [N], entropy of the distribution that each token was drawn from, in nats."""
    choices_NK: torch.Tensor | None = None
    """float [N, K], log-probs of the ids in the columns that the loss names as its `choices`."""
    values_N: torch.Tensor | None = None
    """float [N], values of the states before each token."""
    scores_B: torch.Tensor | None = None
    """float [B], a reward model's scores of the rows."""


class Loss(ABC, Generic[S]):
    """A loss over one micro-batch, which reads what its spec says."""

    needs: Literal["logprobs", "values", "scores"] = "logprobs"
    """The model output that it trains."""
    needs_entropy = False
    """Whether its value depends on entropy."""
    reports_entropy = False
    """Whether entropy is one of its metrics, where there is one."""
    choices: tuple[str, ...] = ()
    """Columns of ids at the place of each token whose log-probs it needs, too, side by side."""
    tells_choices = False
    """Whether the caller is told these log-probs: K numbers a token that leave the device."""
    origin = ""
    """End of messages about its numbers, where the user's code made them; else empty."""
    policy_version: int | None = None
    """Version of the weights that the update begins with; None: not known."""

    def __init__(self, spec: S) -> None:
        self.spec = spec
        self.columns = spec.columns()
        """Columns it reads, besides tokens and prompt_lengths."""
        self.optional_columns = spec.optional_columns()
        """Columns that it also reads where a batch has all of them, for metrics."""

    def scale_of(self, batch: Experience) -> LossScale:
        """Counts a mini-batch, or a part of one, with `columns`; see `LossScale`."""
        return LossScale.of(batch)

    def finished(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics of a whole mini-batch, of those that its shares add up to."""
        return metrics

    def completed(
        self, scale: LossScale, part: Experience, gather: Callable[[Any], list[Any]]
    ) -> LossScale:
        """Adds what the loss must know of a whole mini-batch, beside its counts.

        For losses whose rule for a token depends on the others, e.g. on their mean. All ranks
        call it before the passes of a mini-batch, each with its own part.

        Args:
            scale: Counts over the whole mini-batch.
            part: This rank's rows, with `columns`.
            gather: Hands each rank's facts (JSON-able) to every rank, in the order of ranks. A loss
                that calls it does so on every rank, equally often.

        Returns:
            The scale, equal on all ranks; as it was, for a loss that needs no more.
        """
        return scale

    @abstractmethod
    def __call__(
        self, outputs: ModelOutputs, batch: Experience, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Computes this micro-batch's share of the mini-batch loss.

        Args:
            outputs: Of this micro-batch.
            batch: The same rows, with `columns`.
            scale: Counts over the whole mini-batch.

        Returns:
            The scalar to run backward on, and metrics, one number [] each on the device of the
            outputs, for `MetricShares`. Without unmasked tokens (or pairs) the scalar is 0 and
            still has a gradient, of zeros.
        """


def add_metrics(totals: dict[str, float], share: Mapping[str, float]) -> None:
    """Adds a micro-batch's metrics to those of its mini-batch, in place.

    The one rule: a name that ends in "_max" combines by maximum, every other one by sum. Means
    are sums too, since each share is already divided by the counts of the whole mini-batch.
    """
    for name, number in share.items():
        if name not in totals:
            totals[name] = number
        elif name.endswith("_max"):
            totals[name] = max(totals[name], number)
        else:
            totals[name] += number


class MetricShares:
    """Metrics of the micro-batches of a mini-batch, which stay on the device until all are there.

    Example: shares {"loss": 1.0, "ratio_max": 3.0} and {"loss": 0.5, "ratio_max": 2.0} have the
    totals {"loss": 1.5, "ratio_max": 3.0}.
    """

    def __init__(self) -> None:
        self._names: list[tuple[str, ...]] = []
        self._numbers: list[torch.Tensor] = []

    def add(self, metrics: Mapping[str, torch.Tensor]) -> None:
        """Keeps those of a micro-batch, one number [] each, all on one device."""
        self._names.append(tuple(metrics))
        self._numbers.append(torch.stack([each.detach().double() for each in metrics.values()]))

    def totals(self) -> dict[str, float]:
        """Combines them by `add_metrics`, in their order; reads the device once."""
        totals: dict[str, float] = {}
        if self._numbers:
            numbers = iter(torch.cat(self._numbers).tolist())
            for names in self._names:
                add_metrics(totals, {name: next(numbers) for name in names})
        return totals


_LOSSES: dict[type[Spec], Callable[..., Loss[Any]]] = {}


def loss_for(spec_class: type[Spec]) -> Callable[[type], type]:
    """Registers the decorated class as the loss of a spec; it is built with the spec alone.

    That of an OwnFunctionSpec is built with the function besides.
    """

    def register(loss_class: type) -> type:
        if spec_class in _LOSSES:
            raise ValueError(f"{spec_class.__name__} has a loss already: {_LOSSES[spec_class]}")
        _LOSSES[spec_class] = loss_class
        return loss_class

    return register


def make_loss(spec: Spec, own_functions: OwnFunctions | None = None) -> Loss[Any]:
    """Builds the loss of a spec.

    Args:
        spec: The loss.
        own_functions: Those of the user; None: there are none.

    Raises:
        ValueError: There is no loss for the spec, or no such function (UserCodeError).
    """
    try:
        loss_class = _LOSSES[type(spec)]
    except KeyError:
        known = sorted(spec_class.__name__ for spec_class in _LOSSES)
        raise ValueError(f"no loss for {type(spec).__name__}: give one of {known}") from None
    if isinstance(spec, OwnFunctionSpec):
        return loss_class(spec, (own_functions or OwnFunctions()).of(spec))
    return loss_class(spec)


class UnmaskedReader:
    """Reads model outputs and columns at the unmasked tokens of a micro-batch."""

    def __init__(self, batch: Experience) -> None:
        self._batch = batch
        mask_N, _ = loss_mask_of(batch)
        self._num_tokens = len(mask_N)
        # Places, not the mask: how many they are, a device would have to be asked.
        self._index_M = mask_N.nonzero().flatten()

    def output(self, name: str, output_N: torch.Tensor | None, *, dims: int = 1) -> torch.Tensor:
        """Reads a model output, [N] or [N, K]: float32 [M] or [M, K], or float64 if it came so.

        Args:
            name: For errors.
            output_N: What the model gave.
            dims: 1, or 2 where a token has K numbers.
        """
        if output_N is None:
            raise ValueError(f"{name} is None: the loss needs this output of the model")
        if output_N.shape[:1] != (self._num_tokens,) or output_N.dim() != dims:
            raise ValueError(
                f"{name} has shape {tuple(output_N.shape)}, but the batch has "
                f"{self._num_tokens} completion tokens: give "
                f"{'one number' if dims == 1 else 'K numbers'} a token"
            )
        output_M = output_N.index_select(0, sent(self._index_M, output_N.device))
        return output_M if output_M.dtype == torch.float64 else output_M.float()

    def column(self, name: str, *, like: torch.Tensor) -> torch.Tensor:
        """Reads a column: [M], or [M, K] where a token has K elements, without gradient.

        It gets the type and device of `like`.
        """
        return sent(self.column_on_host(name).to(like.dtype), like.device)

    def row_column(self, name: str, *, like: torch.Tensor) -> torch.Tensor:
        """Reads a column of one number a row, at each token of it: as `column`, [M]."""
        lengths = loss_mask_of(self._batch)[1].diff()
        numbers_N = row_values(self._batch, name).detach().repeat_interleave(lengths)
        return sent(numbers_N.index_select(0, self._index_M).to(like.dtype), like.device)

    def column_on_host(self, name: str) -> torch.Tensor:
        """Reads a column as it lies: [M], of its own type, without gradient."""
        return completion_values(self._batch, name).detach().index_select(0, self._index_M)


def token_share(numbers_M: torch.Tensor, scale: LossScale) -> torch.Tensor:
    """This micro-batch's share of a mean over the tokens of a mini-batch.

    Args:
        numbers_M: Floating [M], of the unmasked tokens of the micro-batch.
        scale: Says how many tokens the whole mini-batch has.

    Returns:
        float64 []: the sum, divided by the tokens of the whole mini-batch.
    """
    return numbers_M.sum(dtype=torch.float64) / scale.token_divisor


def largest(numbers_M: torch.Tensor) -> torch.Tensor:
    """The largest number of [M] that are not negative, of their type []; 0 where M is 0."""
    return numbers_M.max() if len(numbers_M) else numbers_M.new_zeros(())
