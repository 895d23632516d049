"""Losses and estimators of the user: copies of ours equal ours, and what is wrong is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.parallel_training import Job, make_trainer
from support.ragged_batches import mixed_masks, random_batch
from support.rank_processes import RankContext, RankPool
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import update_whole

from rolemesh.engine.algorithms.estimators.estimation import Controllers, estimate_advantages
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.granted.own_functions import OwnFunctions
from rolemesh.engine.granted.user_code import UserCodeError
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.specs import (
    AdaptiveKlSpec,
    EstimatorPartSpec,
    GrpoSpec,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
    OverlongSpec,
    OwnFunctionSpec,
    PpoPolicyLossSpec,
    PythonEstimatorSpec,
    PythonPolicyLossSpec,
)
from rolemesh.engine.train.trainer import LossNotFiniteError, Trainer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_losses.py"

WRONG = '''
import torch

def short(tokens):
    return tokens.logprobs_M[:-1] if len(tokens.logprobs_M) else tokens.logprobs_M

def mean(tokens):
    return tokens.logprobs_M.sum()

def number(tokens):
    return 0.5

def whole(tokens):
    return torch.ones(len(tokens.logprobs_M), dtype=torch.int64)

def detached(tokens):
    return tokens.logprobs_M.detach() * tokens.advantages_M

def nan(tokens):
    return tokens.logprobs_M * float("nan")

def typo(tokens):
    return tokens.logprob_M

def late(tokens):
    """Fails for some micro-batches alone."""
    if len(tokens.logprobs_M) > 6:
        raise OverflowError("too many")
    return -tokens.logprobs_M * tokens.advantages_M

def odd_name(tokens):
    return {"loss": tokens.logprobs_M}

def our_metric(tokens):
    return {"losses": tokens.logprobs_M, "metrics": {"entropy": tokens.logprobs_M}}

def short_metric(tokens):
    return {"losses": tokens.logprobs_M, "metrics": {"mine": torch.zeros(3)}}

def reads_values(tokens):
    return -tokens.logprobs_M * (tokens.advantages_M - tokens.columns["values"])

def per_row(batch):
    return batch.scores_B

def integers(batch):
    return torch.zeros(len(batch.mask_N), dtype=torch.int64)

def infinite(batch):
    advantages = torch.zeros(len(batch.mask_N))
    advantages[batch.mask_N.nonzero()[-1]] = float("inf")
    return advantages

def no_returns(batch):
    return {"advantages": batch.token_rewards_N}

def text_metric(batch):
    return {"advantages": batch.token_rewards_N, "metrics": {"mine": "high"}}

def our_number(batch):
    return {"advantages": batch.token_rewards_N, "metrics": {"reward/mean": 1.0}}

def leaves(batch):
    raise SystemExit(3)

def with_all(batch, bonus):
    lengths = torch.tensor([float(len(text)) for text in batch.columns["completion_text"]])
    values = batch.columns["values"]
    returns = batch.token_rewards_N + values
    return {
        "advantages": batch.to_each_token(bonus * lengths + batch.columns["costs"]) - values,
        "returns": returns,
        "metrics": {"length": lengths.mean().item()},
    }

def needs_more(batch, threshold):
    return batch.token_rewards_N

NOT_ONE = 5
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    write_tiny_llama(folder / "model", seed=4)
    (folder / "wrong.py").write_text(WRONG)
    return folder


def loaded(spec: Any) -> OwnFunctions:
    part = OwnFunctionSpec(function=spec.function, config=spec.config)
    return OwnFunctions({"algorithm.part": part})


# --- losses ---------------------------------------------------------------------------------


def policy_batch() -> Experience:
    batch = token_batch()
    generator = torch.Generator().manual_seed(2)
    offsets = batch["loss_mask"].offsets
    drawn = {
        # Far enough from the model's own that both clips act.
        name: Column(
            ColumnKind.COMPLETION,
            -6.2 + 0.5 * torch.randn(len(batch["loss_mask"].values), generator=generator),
            offsets,
        )
        for name in ("logprobs", "reference_logprobs", "proximal_logprobs")
    }
    return batch | Experience(drawn)


def trained(
    folder: Path, loss: LossSpec, own: OwnFunctions | None = None
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and weights after an update of two epochs and several micro-batches."""
    torch.manual_seed(0)
    spec = ModelSpec(path=folder / "model", compute_dtype="float32", micro_batch_tokens=24)
    trainer = Trainer.policy(spec, OptimizerSpec(learning_rate=1e-3))
    trainer.own_functions = own
    metrics = update_whole(trainer, policy_batch(), loss, epochs=2, mini_batch_rows=3, seed=5)
    return metrics, {name: weight.clone() for name, weight in trainer.named_weights()}


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"aggregation": "seq_mean_token_mean", "entropy_coefficient": 0.01, "kl_in_loss": 0.1},
        {"aggregation": "seq_sum_norm", "norm_length": 9, "temperature": 0.7},
    ],
    ids=["plain", "terms", "norm"],
)
def test_a_copy_of_ppos_loss_equals_it_to_the_last_bit(folder: Path, terms: dict[str, Any]) -> None:
    copy = PythonPolicyLossSpec(
        function=f"{EXAMPLE}:clipped", config={"low": 0.2, "high": 0.3}, **terms
    )
    expected, weights = trained(folder, PpoPolicyLossSpec(clip_low=0.2, clip_high=0.3, **terms))
    metrics, own_weights = trained(folder, copy, loaded(copy))
    assert metrics == expected
    assert expected["clip_fraction_high"] > 0
    assert expected["clip_fraction_low"] > 0
    assert weights.keys() == own_weights.keys()
    assert all(torch.equal(weights[name], own_weights[name]) for name in weights)
    # The config counts: another clip is another run.
    other = copy.model_copy(update={"config": {"low": 0.2, "high": 0.1}})
    assert trained(folder, other, loaded(other))[0]["loss"] != expected["loss"]


def test_a_loss_reads_the_columns_that_it_names(folder: Path) -> None:
    reads = PythonPolicyLossSpec(
        function=f"{folder / 'wrong.py'}:reads_values", reads=("values", "proximal_logprobs")
    )
    assert reads.columns() == (
        "logprobs", "advantages", "loss_mask", "values", "proximal_logprobs",
    )  # fmt: skip
    metrics, _ = trained(folder, reads, loaded(reads))
    batch = policy_batch()
    # The old log-probs are then those at the start of the update: at its first step the ratio of
    # the reported metric is exp(model - proximal).
    plain = reads.model_copy(update={"reads": ("values",)})
    assert metrics["ratio_mean"] != trained(folder, plain, loaded(plain))[0]["ratio_mean"]
    assert "values" in batch


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", r"gave losses of shape \[\d+\] on cpu: give a tensor \[M\] on cpu, one number"),
        (
            "mean",
            r"shape \[\] on cpu: .*each sampled token \(M was \d+ in.*do not sum or average",
        ),
        ("number", r"gave losses as a float: give a tensor \[M\] on cpu"),
        ("whole", "gave losses of torch.int64: give floating numbers"),
        ("detached", "gave losses without a gradient: compute them from tokens.logprobs_M"),
        ("typo", r"failed: AttributeError: .*\(at .*wrong\.py:LINE, in typo\)"),
        ("late", r"failed: OverflowError: too many \(at .*wrong\.py:LINE, in late\)"),
        ("odd_name", r"gave a mapping with \['loss'\]: give 'losses', and no more than 'ratio'"),
        ("our_metric", "gave metrics called entropy: these are ours"),
        ("short_metric", r"gave the metric mine of shape \[3\]"),
    ],
)
def test_a_loss_that_cannot_be_used_is_told_with_file_and_line(
    folder: Path, name: str, message: str
) -> None:
    spec = PythonPolicyLossSpec(function=f"{folder / 'wrong.py'}:{name}")
    raises = {"typo": "tokens.logprob_M\n", "late": "raise OverflowError"}.get(name)
    line = line_of(raises or f"def {name}(")
    with pytest.raises(UserCodeError, match=message.replace("LINE", str(line))) as caught:
        trained(folder, spec, loaded(spec))
    assert f"wrong.py:{line}" in str(caught.value)


def line_of(text: str) -> int:
    """Line of wrong.py on which the text stands."""
    return WRONG[: WRONG.index(text)].count("\n") + 1


def test_a_loss_that_is_not_finite_is_handled_as_ours_and_named(folder: Path) -> None:
    spec = PythonPolicyLossSpec(function=f"{folder / 'wrong.py'}:nan")
    with pytest.raises(LossNotFiniteError, match=r"'.*wrong\.py:nan' \(.*wrong.py:\d+\)"):
        trained(folder, spec, loaded(spec))


def refused_on_ranks(at: RankContext, job: Job) -> tuple[str, dict[str, float]]:
    """What each rank says of a loss that fails on some of them, and a good update afterwards."""
    with at.connect(HybridLayout(job.layout)) as mesh:
        trainer = make_trainer(job, at, mesh)
        trainer.own_functions = loaded(job.loss)
        numbers: dict[str, Any] = {"epochs": 1, "mini_batch_rows": 3, "seed": 5}
        with pytest.raises(UserCodeError) as caught:
            update_whole(trainer, job.batch, job.loss, **numbers)
        return str(caught.value), update_whole(trainer, job.batch, PpoPolicyLossSpec(), **numbers)


def test_all_ranks_tell_alike_of_a_loss_that_failed_on_one_and_go_on(
    folder: Path, rank_pool: RankPool
) -> None:
    spec = PythonPolicyLossSpec(function=f"{folder / 'wrong.py'}:late")
    job = Job(folder / "model", policy_batch(), spec, layout=TrainLayout(dp=2))
    told, metrics = zip(*rank_pool.run(refused_on_ranks, 2, job), strict=True)
    assert told[0] == told[1]
    assert "rank 0: " in told[0] or "rank 1: " in told[0]
    assert "OverflowError: too many (at " in told[0]
    assert metrics[0] == metrics[1]


# --- estimators -----------------------------------------------------------------------------


def judged_batch() -> Experience:
    """Eight rows of three prompts, an empty one and one that is all masked among them."""
    ranges = dict.fromkeys(("logprobs", "reference_logprobs", "values"), (-1.0, 1.0))
    batch = random_batch(mixed_masks(seed=71), ranges, seed=72).experience(torch.float32)
    num_rows = len(batch)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25, 1.0, 1.0, 0.0, 0.75])[:num_rows]
    return batch | Experience(
        {
            "rewards": Column(ColumnKind.ROW, rewards),
            "costs": Column(ColumnKind.ROW, 2 * rewards),
            "prompt_ids": Column(ColumnKind.ROW, torch.tensor([4, 4, 2, 2, 4, 2, 9, 2])[:num_rows]),
            "is_judged": Column(ColumnKind.ROW, torch.arange(num_rows) != 3),
            "completion_text": Column.text(["word" * row for row in range(num_rows)]),
        }
    )


def estimated(
    spec: EstimatorPartSpec, own: OwnFunctions | None = None
) -> tuple[Experience, dict[str, float], dict[str, Any]]:
    controllers = Controllers.from_spec(spec)
    columns, metrics = estimate_advantages(judged_batch(), spec, controllers, own_functions=own)
    return columns, metrics, controllers.state_dict()


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize(
    "terms",
    [{}, {"kl_in_reward": AdaptiveKlSpec(), "overlong": OverlongSpec(max_length=6, buffer=3)}],
    ids=["plain", "terms"],
)
def test_a_copy_of_grpos_estimator_equals_it_to_the_last_bit(
    divide: bool, terms: dict[str, Any]
) -> None:
    copy = PythonEstimatorSpec(
        function=f"{EXAMPLE}:group_relative", config={"divide": divide}, **terms
    )
    expected, ours, state = estimated(GrpoSpec(normalize_std=divide, **terms))
    columns, metrics, own_state = estimated(copy, loaded(copy))
    assert columns.columns.keys() == expected.columns.keys()
    for name, column in expected.columns.items():
        assert torch.equal(column.values, columns[name].values)
        assert column.values.dtype == columns[name].values.dtype
    assert metrics.items() <= ours.items()
    assert {name for name in ours if name not in metrics} == {
        name for name in ours if name.startswith("groups/")
    }
    assert own_state == state
    assert expected["advantages"].values.abs().sum() > 0


def test_an_estimator_reads_columns_of_every_kind_and_makes_returns(folder: Path) -> None:
    spec = PythonEstimatorSpec(
        function=f"{folder / 'wrong.py'}:with_all",
        config={"bonus": 0.5},
        reads=("values", "costs", "completion_text"),
        makes_returns=True,
    )
    columns, metrics, _ = estimated(spec, loaded(spec))
    batch = judged_batch()
    assert set(columns.columns) == set(spec.makes()) == {"advantages", "token_rewards", "returns"}
    mask, values = batch["loss_mask"], batch["values"]
    for row in range(len(batch)):
        own = mask.slice(row, row + 1).values
        judged = bool(batch["is_judged"].values[row])
        expected = 0.5 * 4 * row + 2 * batch["rewards"].values[row]
        expected = (expected - values.slice(row, row + 1).values) * own * judged
        got = columns["advantages"].slice(row, row + 1).values
        assert torch.allclose(got, expected, atol=1e-6)
        assert (got[~own] == 0).all()
    lengths = [4.0 * row for row in range(len(batch)) if row != 3]
    assert metrics["length"] == pytest.approx(sum(lengths) / len(lengths))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("per_row", {}, r"gave advantages of shape \[\d\] and .*batch.to_each_token makes them"),
        ("integers", {}, r"gave advantages of shape \[\d+\] and torch.int64: give floating"),
        ("infinite", {}, r"gave advantages inf at completion token \d+ of row \d \(1 of \d+ are"),
        ("no_returns", {"makes_returns": True}, "gave no returns, but makes_returns is true"),
        ("text_metric", {}, "gave the metric 'mine' as 'high': give a finite number"),
        ("our_number", {}, "gave a metric called 'reward/mean', which is one of ours"),
        ("leaves", {}, r"failed: SystemExit: 3 \(at .*wrong\.py:\d+, in leaves\)"),
    ],
)
def test_an_estimate_that_cannot_be_used_is_told_and_moves_no_controller(
    folder: Path, name: str, options: dict[str, Any], message: str
) -> None:
    spec = PythonEstimatorSpec(
        function=f"{folder / 'wrong.py'}:{name}", kl_in_reward=AdaptiveKlSpec(), **options
    )
    controllers = Controllers.from_spec(spec)
    before = controllers.state_dict()
    with pytest.raises(UserCodeError, match=message) as caught:
        estimate_advantages(judged_batch(), spec, controllers, own_functions=loaded(spec))
    assert "wrong.py:" in str(caught.value)
    assert controllers.state_dict() == before


# --- loading --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "config", "message"),
    [
        ("{wrong}:no_such", {}, r"algorithm.part.function is .*has no 'no_such'"),
        ("/nowhere/mine.py:f", {}, r"algorithm.part.function is .*is no file"),
        ("{wrong}:NOT_ONE", {}, r"algorithm.part.function is .*is no function but a int"),
        ("{wrong}:needs_more", {}, r"config is \{\}, and .*wrong\.py:\d+\).*missing.*'threshold'"),
        ("{wrong}:mean", {"x": 1}, r"algorithm.part.config is \{'x': 1\}.*unexpected.*'x'"),
    ],
)
def test_a_function_that_cannot_be_called_is_told_when_it_is_loaded(
    folder: Path, function: str, config: dict[str, Any], message: str
) -> None:
    spec = OwnFunctionSpec(function=function.format(wrong=folder / "wrong.py"), config=config)
    with pytest.raises(UserCodeError, match=message):
        OwnFunctions({"algorithm.part": spec})


def test_what_was_not_loaded_at_the_start_is_never_run(folder: Path) -> None:
    spec = PythonPolicyLossSpec(function=f"{folder / 'wrong.py'}:typo")
    for own in (None, OwnFunctions({"one": OwnFunctionSpec(function=f"{EXAMPLE}:clipped")})):
        with pytest.raises(UserCodeError, match="which this service has not loaded: name it in"):
            trained(folder, spec, own)
