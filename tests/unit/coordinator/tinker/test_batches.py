"""Data of Tinker's clients as columns of experience."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rolemesh.coordinator.tinker.batches import LOSSES, GradientBatch, batch_of, logprobs_of
from rolemesh.coordinator.tinker.forms.forms import Datum, GradientCall, WireError
from rolemesh.engine.layout.payload import MAX_WIDTH
from rolemesh.engine.specs.losses.token_sums import TokenSumLossSpec
from rolemesh.rpc.experience.columns import ColumnData, ColumnKind, Columns

LONGEST = 8
WITH_RATIOS = ("importance_sampling", "ppo", "cispo", "gspo", "dro")


def ints(values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)


def floats(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    return np.asarray(values, dtype=np.float32)


def datum(tokens: list[int], targets: npt.ArrayLike | None, **inputs: npt.ArrayLike) -> Datum:
    found: dict[str, npt.NDArray[Any]] = {name: floats(one) for name, one in inputs.items()}
    if targets is not None:
        found["target_tokens"] = ints(targets)
    return Datum(ints(tokens), found)


def call(*data: Datum, loss: str = "cross_entropy", **config: float | str) -> GradientCall:
    return GradientCall(
        model_id="m", seq_id=1, data=data, loss=loss, config=config, forward_only=False
    )


def rows(batch: GradientBatch, name: str) -> list[list[Any]]:
    return [row.tolist() for row in batch.columns[name].rows()]


SHIFTED = datum([5, 6, 7], [6, 7, 8], weights=[1, 0.5, -2])
OTHER = datum([5, 6, 7], [6, 9, 8], weights=[1, 0.5, -2])


def with_ratios(targets: npt.ArrayLike = (6, 7, 8)) -> Datum:
    return datum([5, 6, 7], targets, logprobs=[-1, -2, -3], advantages=[1, 0, -1])


def test_targets_that_are_the_next_tokens_are_the_rows_own() -> None:
    batch = batch_of(call(SHIFTED, datum([4], [3])), LONGEST)
    assert rows(batch, "tokens") == [[5, 6, 7, 8], [4, 3]]
    assert rows(batch, "prompt_lengths") == [[1], [1]]
    assert rows(batch, "loss_mask") == [[True] * 3, [True]]
    # A datum that gives no weights has weights of one.
    assert rows(batch, "token_weights") == [[1, 0.5, -2], [1]]
    assert set(batch.columns) == {"tokens", "prompt_lengths", "loss_mask", "token_weights"}
    assert batch.loss == {"type": "token_sum", "form": "cross_entropy"}
    assert (batch.reads, batch.is_flat) == ("logprobs", True)


def test_other_targets_stand_beside_the_row() -> None:
    batch = batch_of(call(SHIFTED, OTHER), LONGEST)
    # One datum has them, so that all do; behind the last input anything may stand.
    assert rows(batch, "tokens") == [[5, 6, 7, 0]] * 2
    assert rows(batch, "target_ids") == [[6, 7, 8], [6, 9, 8]]
    assert batch.columns["target_ids"].values.dtype == np.int32
    assert batch.loss["targets"] == 1
    assert (batch.reads, batch.is_flat) == ("choices", True)


@pytest.mark.parametrize("width", [1, 3])
def test_several_targets_a_place_are_a_wide_column(width: int) -> None:
    targets, weights = np.arange(3 * width).reshape(3, width), np.ones((3, width))
    batch = batch_of(call(datum([5, 6, 7], targets, weights=weights)), LONGEST)
    assert batch.columns["target_ids"].values.shape == (3, width)
    assert batch.columns["token_weights"].values.shape == (3, width)
    assert batch.loss["targets"] == width
    assert (batch.reads, batch.is_flat) == ("choices", False)


@pytest.mark.parametrize("loss", WITH_RATIOS)
def test_losses_with_ratios_have_their_columns(loss: str) -> None:
    batch = batch_of(call(with_ratios(), loss=loss), LONGEST)
    assert rows(batch, "logprobs") == [[-1, -2, -3]]
    assert rows(batch, "advantages") == [[1, 0, -1]]
    beside = {"tokens", "prompt_lengths"}
    assert set(batch.columns) - beside == set(TokenSumLossSpec(**batch.loss).columns())


def test_the_mask_of_a_rows_ratio_is_one_where_none_is_given() -> None:
    masked = datum([5, 6], [6, 7], logprobs=[0, 0], advantages=[1, 1], sequence_ratio_mask=[0, 1])
    batch = batch_of(call(with_ratios(), masked, loss="gspo"), LONGEST)
    assert rows(batch, "sequence_ratio_mask") == [[1, 1, 1], [0, 1]]


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_takes_other_targets(loss: str) -> None:
    batch = batch_of(call(with_ratios([6, 6, 6]), loss=loss), LONGEST)
    spec = TokenSumLossSpec(**batch.loss)
    assert spec.targets == 1
    assert set(spec.columns()) <= set(batch.columns)


@pytest.mark.parametrize(
    ("loss", "config", "parameters"),
    [
        ("ppo", {"clip_low_threshold": 0.7}, {"clip_low": 0.7}),
        ("cispo", {"clip_high_threshold": 3}, {"clip_high": 3.0}),
        (
            "gspo",
            {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
            {"clip_low": 0.9, "clip_high": 1.1},
        ),
        ("dro", {"beta": 0.1}, {"beta": 0.1}),
    ],
)
def test_settings_have_their_names_here(
    loss: str, config: dict[str, float], parameters: dict[str, float]
) -> None:
    batch = batch_of(call(with_ratios(), loss=loss, **config), LONGEST)
    assert batch.loss == {"type": "token_sum", "form": loss, **parameters}


TARGETS = r"data\.0\.loss_fn_inputs\.target_tokens"
ADVANTAGES = r"data\.0\.loss_fn_inputs\.advantages"
REFUSED = {
    "unknown loss": (call(SHIFTED, loss="mse"), "loss_fn: mse: no such loss .* cross_entropy, "),
    "stable_reinforce": (
        call(SHIFTED, loss="stable_reinforce"),
        "loss_fn: stable_reinforce: its definition is not public: give one of cross_entropy, ",
    ),
    "custom": (
        call(SHIFTED, loss="custom"),
        "loss_fn_config.loss_id: None: this session has none of that id",
    ),
    "unknown setting": (
        call(with_ratios(), loss="ppo", clip=1.0),
        r"loss_fn_config\.clip: 1.0: ppo has the settings clip_low_threshold, clip_high_threshold",
    ),
    "setting of a loss without": (
        call(SHIFTED, beta=1.0),
        r"loss_fn_config\.beta: 1.0: cross_entropy has the settings none",
    ),
    "text for a number": (
        call(with_ratios(), loss="dro", beta="much"),
        r"loss_fn_config\.beta: much: give a finite number",
    ),
    "infinite setting": (
        call(with_ratios(), loss="dro", beta=float("inf")),
        r"loss_fn_config\.beta: inf: give a finite number",
    ),
    "bounds in the wrong order": (
        call(with_ratios(), loss="ppo", clip_low_threshold=3.0),
        r"loss_fn_config: \{'clip_low_threshold': 3.0\}: clip_low is 3.0 and clip_high 1.2: give a",
    ),
    "negative setting": (
        call(with_ratios(), loss="dro", beta=-1.0),
        r"loss_fn_config: \{'beta': -1.0\}: Input should be greater than 0",
    ),
    "no targets": (call(datum([5], None)), f"{TARGETS}: none: give the tokens to score"),
    "too few targets": (call(datum([5, 6], [6])), rf"{TARGETS}: int64 \[1\]: .* shape \[2\]"),
    "three dimensions": (call(datum([5], [[[6]]])), rf"{TARGETS}: int64 \[1, 1, 1\]"),
    "float targets": (
        call(Datum(ints([5]), {"target_tokens": floats([6])})),
        rf"{TARGETS}: float32 \[1\]: give int64",
    ),
    "no targets a place": (
        call(datum([5], np.zeros((1, 0)))),
        rf"{TARGETS}: \[1, 0\]: give 1 to {MAX_WIDTH} targets a place",
    ),
    "too many a place": (
        call(datum([5], np.zeros((1, MAX_WIDTH + 1)))),
        rf"{TARGETS}: \[1, {MAX_WIDTH + 1}\]: give 1 to {MAX_WIDTH}",
    ),
    "negative id": (call(datum([5, 6], [6, -4])), f"{TARGETS}: -4: give ids of the vocabulary"),
    "large id": (call(datum([5, 6], [6, 2**31])), f"{TARGETS}: {2**31}: give ids"),
    "several widths": (
        call(datum([5], [[1]]), datum([5], [[1, 2]])),
        r"target_tokens: \[\[1\], \[2\]\]: give all data of a call as many targets",
    ),
    "several a place for a ratio": (
        call(datum([5], [[1, 2]]), loss="ppo"),
        "target_tokens: 2 a place: give one a place for ppo",
    ),
    "too long": (
        call(datum([5] * LONGEST, [5] * LONGEST)),
        r"data\.0\.model_input: 8 tokens: the model takes 7: shorten it",
    ),
    "no advantages": (
        call(datum([5], [6], logprobs=[0]), loss="ppo"),
        f"{ADVANTAGES}: none: the loss ppo needs it",
    ),
    "other shape": (
        call(datum([5, 6], [6, 7], logprobs=[0, 0], advantages=[1]), loss="cispo"),
        rf"{ADVANTAGES}: \[1\]: give the shape of target_tokens, \[2\]",
    ),
    "flat weights of wide targets": (
        call(datum([5, 6], [[1, 2], [3, 4]], weights=[1, 1])),
        r"data\.0\.loss_fn_inputs\.weights: \[2\]: give the shape of target_tokens, \[2, 2\]",
    ),
    "NaN": (
        call(SHIFTED, datum([5], [6], weights=[float("nan")])),
        r"data\.1\.loss_fn_inputs\.weights: NaN or infinite: give finite numbers",
    ),
    "infinite": (
        call(datum([5], [6], logprobs=[0], advantages=[-np.inf]), loss="dro"),
        f"{ADVANTAGES}: NaN or infinite",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_and_named(wrong: GradientCall, message: str) -> None:
    with pytest.raises(WireError, match=message):
        batch_of(wrong, LONGEST)


def test_the_longest_datum_that_fits_is_taken() -> None:
    tokens = [5] * (LONGEST - 1)
    assert batch_of(call(datum(tokens, tokens)), LONGEST).columns["tokens"].lengths() == [LONGEST]


@pytest.mark.parametrize(
    ("targets", "shape"), [([6, 7], (2,)), ([[6], [7]], (2, 1)), ([[6, 1], [7, 2]], (2, 2))]
)
def test_log_probs_come_back_in_the_shape_of_the_targets(
    targets: npt.ArrayLike, shape: tuple[int, ...]
) -> None:
    batch = batch_of(call(datum([5, 6], targets)), LONGEST)
    # As it is read from the wire: of width 1 it has one dimension.
    values = np.arange(np.prod(shape), dtype=np.float32)
    told = values.reshape(shape) if len(shape) > 1 and shape[1] > 1 else values
    column = ColumnData(ColumnKind.COMPLETION, told, ints([0, 2]))
    (found,) = logprobs_of(batch, Columns({batch.reads: column}))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, values.reshape(shape))
