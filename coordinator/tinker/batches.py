"""Data of a client as columns of experience, and what came of them as arrays again.

A datum of T tokens becomes a row whose prompt is its first token and whose completion has T places:
place t is behind token t, where target t is scored. Where the targets are the tokens themselves,
one place on, they are the row's own; otherwise they are a column beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from rolemesh.coordinator.tinker.forms.forms import Datum, Floats, GradientCall, Ints, WireError
from rolemesh.coordinator.tinker.own_losses import OwnLoss, own_columns
from rolemesh.engine.specs import TokenSumLossSpec
from rolemesh.engine.specs.columns import MAX_WIDTH, RATIO_MASK, TARGET_IDS, TOKEN_WEIGHTS
from rolemesh.rpc.experience.columns import ColumnData, Columns

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "dro")
"""Names of losses that are served."""

_UNDEFINED = {
    "stable_reinforce": "its definition is not public",
}
"""Names that clients know and that are not served, each with the reason."""

_CLIPS = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"}
_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "ppo": _CLIPS,
    "cispo": _CLIPS,
    "gspo": _CLIPS,
    "dro": {"beta": "beta"},
}
"""Settings of a loss, and what they are called here."""


@dataclass(frozen=True, slots=True)
class GradientBatch:
    """A call's data, as a service takes them."""

    columns: Columns
    loss: Mapping[str, Any]
    """The loss `token_sum` with its parameters, or one of the client's."""
    reads: str
    """Column of the outputs that has the log-probs of the targets."""
    is_flat: bool
    """Whether a place has one target, in one dimension."""
    num_data: int
    """Rows."""
    metrics: tuple[str, ...] = ()
    """What a loss of the client's tells, by `NAME:REDUCTION`; sums over the data."""

    @property
    def num_tokens(self) -> int:
        """Of all data."""
        return len(self.columns["tokens"].values)


def batch_of(
    call: GradientCall, longest: int, own_losses: Mapping[str, OwnLoss] | None = None
) -> GradientBatch:
    """The columns of a call.

    Args:
        call: Of a client.
        longest: Most tokens of a datum.
        own_losses: Losses that the client has brought, by their ids.

    Raises:
        WireError: A loss or a setting that is not served, or inputs that do not fit; names them.
    """
    own = _own_loss(call, own_losses or {}) if call.loss == "custom" else None
    if own is None and call.loss not in LOSSES:
        why = _UNDEFINED.get(call.loss, "no such loss is known here")
        raise WireError("loss_fn", call.loss, f"{why}: give one of {', '.join(LOSSES)}")
    targets = [_targets(place, datum, longest) for place, datum in enumerate(call.data)]
    widths = {target.shape[1:] for target in targets}
    if len(widths) > 1:
        raise WireError(
            "data.loss_fn_inputs.target_tokens",
            sorted(map(list, widths)),
            "give all data of a call as many targets a place",
        )
    width = next(iter(widths))
    given = bool(width) or not all(map(_is_shifted, call.data, targets))
    if width and own is None and call.loss != "cross_entropy":
        raise WireError(
            "data.loss_fn_inputs.target_tokens",
            f"{width[0]} a place",
            f"give one a place for {call.loss}; several go with cross_entropy",
        )
    columns = {
        "tokens": ColumnData.sequence(
            [
                # Behind the last place any token may stand: nothing is scored after it.
                np.append(datum.tokens, 0 if given else target[-1])
                for datum, target in zip(call.data, targets, strict=True)
            ]
        ),
        "prompt_lengths": ColumnData.row([1] * len(call.data), np.int64),
        "loss_mask": ColumnData.completion([np.ones(len(one), bool) for one in targets], bool),
    }
    loss: dict[str, Any] = (
        {"type": "token_sum", "form": call.loss, **_parameters(call)}
        if own is None
        else dict(own.section)
    )
    if given:
        columns[TARGET_IDS] = ColumnData.completion(
            [one.reshape(len(one), -1) for one in targets] if width else targets, np.int32
        )
        loss["targets"] = width[0] if width else 1
    if own is None:
        _check(call, loss)
        for name, column in _inputs(call, targets).items():
            columns[name] = ColumnData.completion(column)
    else:
        columns |= own_columns(call, targets, own.inputs)
    return GradientBatch(
        columns=Columns(columns),
        loss=loss,
        reads="choices" if given else "logprobs",
        is_flat=not width,
        num_data=len(call.data),
        metrics=() if own is None else own.metrics,
    )


def _own_loss(call: GradientCall, own_losses: Mapping[str, OwnLoss]) -> OwnLoss:
    loss_id = call.config.get("loss_id")
    if not isinstance(loss_id, str) or loss_id not in own_losses:
        raise WireError(
            "loss_fn_config.loss_id", loss_id, "this session has none of that id: create it first"
        )
    return own_losses[loss_id]


def _targets(place: int, datum: Datum, longest: int) -> Ints:
    """A datum's targets, int64 [T] or [T, K]."""
    name = f"data.{place}.loss_fn_inputs.target_tokens"
    if len(datum.tokens) >= longest:
        raise WireError(
            f"data.{place}.model_input",
            f"{len(datum.tokens)} tokens",
            f"the model takes {longest - 1}: shorten it",
        )
    found = datum.inputs.get("target_tokens")
    if found is None:
        raise WireError(name, "none", "give the tokens to score, one for each input token")
    if found.dtype != np.int64 or found.ndim not in (1, 2) or len(found) != len(datum.tokens):
        raise WireError(
            name,
            f"{found.dtype} {list(found.shape)}",
            f"give int64 of shape [{len(datum.tokens)}], or [{len(datum.tokens)}, K]",
        )
    if found.ndim == 2 and not 1 <= found.shape[1] <= MAX_WIDTH:
        raise WireError(name, list(found.shape), f"give 1 to {MAX_WIDTH} targets a place")
    for token in (int(found.min()), int(found.max())):
        if not 0 <= token < 2**31:
            raise WireError(name, token, "give ids of the vocabulary")
    return found


def _is_shifted(datum: Datum, targets: Ints) -> bool:
    """Whether the targets are the input tokens one place on, and one more."""
    return targets.ndim == 1 and np.array_equal(targets[:-1], datum.tokens[1:])


def _parameters(call: GradientCall) -> dict[str, float]:
    known = _SETTINGS.get(call.loss, {})
    for name, value in call.config.items():
        if name not in known:
            has = ", ".join(known) or "none"
            raise WireError(f"loss_fn_config.{name}", value, f"{call.loss} has the settings {has}")
        if isinstance(value, str) or not math.isfinite(value):
            raise WireError(f"loss_fn_config.{name}", value, "give a finite number")
    return {known[name]: float(value) for name, value in call.config.items()}


def _check(call: GradientCall, loss: Mapping[str, Any]) -> None:
    """Refuses settings that cannot be together; a service would tell of them in its own words."""
    try:
        TokenSumLossSpec.model_validate(loss)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise WireError("loss_fn_config", dict(call.config), why) from error


def _inputs(call: GradientCall, targets: Sequence[Ints]) -> dict[str, list[npt.NDArray[Any]]]:
    """Float columns of the loss by their names here."""
    if call.loss == "cross_entropy":
        return {TOKEN_WEIGHTS: _floats(call, "weights", targets, missing=1.0)}
    columns = {name: _floats(call, name, targets) for name in ("logprobs", "advantages")}
    if call.loss == "gspo":
        columns[RATIO_MASK] = _floats(call, RATIO_MASK, targets, missing=1.0)
    return columns


def _floats(
    call: GradientCall, name: str, targets: Sequence[Ints], missing: float | None = None
) -> list[npt.NDArray[Any]]:
    """One number for each target; `missing` where a datum does not give the input."""
    found = []
    for place, (datum, target) in enumerate(zip(call.data, targets, strict=True)):
        field, values = f"data.{place}.loss_fn_inputs.{name}", datum.inputs.get(name)
        if values is None and missing is None:
            raise WireError(field, "none", f"the loss {call.loss} needs it: one number a token")
        if values is None:
            values = np.full(target.shape, missing, dtype=np.float32)
        if values.shape != target.shape:
            raise WireError(
                field, list(values.shape), f"give the shape of target_tokens, {list(target.shape)}"
            )
        if not np.isfinite(values).all():
            raise WireError(field, "NaN or infinite", "give finite numbers")
        found.append(values.astype(np.float32))
    return found


def logprobs_of(batch: GradientBatch, outputs: Columns) -> list[Floats]:
    """Log-probs of the targets of each datum, float32 [T] or [T, K].

    Args:
        batch: What was computed.
        outputs: The column `batch.reads`.
    """
    rows = [np.asarray(row, dtype=np.float32) for row in outputs[batch.reads].rows()]
    # A column of width 1 comes in one dimension, also where [T, 1] was asked for.
    return [row.reshape(-1) if batch.is_flat else row.reshape(len(row), -1) for row in rows]
