"""The trainer against a hand-written loop, and against itself with other cuts."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_streams import FakeStreams
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import forward_backward, plan_whole, update_whole
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.payload import ColumnMissingError
from rolemesh.engine.parallel import matrix_owners
from rolemesh.engine.specs import (
    LossSpec,
    ModelSpec,
    MuonSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    PpoValueLossSpec,
)
from rolemesh.engine.train.model_in_training import GradientPendingError
from rolemesh.engine.train.optimizers import optimizer
from rolemesh.engine.train.optimizers.host_moments import MOMENTS, STATE_NAMES
from rolemesh.engine.train.optimizers.optimizer import Optimizer, warmed_up
from rolemesh.engine.train.trainer import (
    LossNotFiniteError,
    NoGradientError,
    Trainer,
)

CUT_TOLERANCE = 1e-6
"""Relative, of the norm: the same float32 products in other blocks. Each cut by itself is 4e-7
away from float64 at transformers' usual width of weights, and 1.3e-6 at that of `folder`."""
USUAL_INITIALIZER_RANGE = 0.02
LOOP_TOLERANCE = 1e-5
"""A step of 1e-3 scaled by a ratio of moments that differs in the last bits of float32."""

POLICY_LOSS = PpoPolicyLossSpec(entropy_coefficient=0.01, kl_in_loss=0.1)
VALUE_LOSS = PpoValueLossSpec()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)


def _trainer(folder: Path, kind: str = "policy", **options: Any) -> Trainer:
    given = {"learning_rate": 1e-3, **options.pop("optimizer", {})}
    optimizer = (MuonSpec if given.get("type") == "muon" else OptimizerSpec)(**given)
    spec = ModelSpec.model_validate({"path": folder, "compute_dtype": "float32", **options})
    return (Trainer.policy if kind == "policy" else Trainer.critic)(spec, optimizer)


def _batch(trainer: Trainer, seed: int = 0) -> Experience:
    """A batch whose old log-probs are near the trainer's, so that some ratios are clipped."""
    batch = token_batch(seed=seed)
    if trainer.kind == "critic":
        return batch
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    generator = torch.Generator().manual_seed(seed)

    def moved(scale: float) -> Column:
        noise_N = scale * torch.randn(len(scored.values), generator=generator)
        return Column(ColumnKind.COMPLETION, scored.values + noise_N, scored.offsets)

    return batch | Experience({"logprobs": moved(0.3), "reference_logprobs": moved(0.5)})


def _gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        name: weight.grad.clone()
        for name, weight in trainer.model.named_weights()
        if weight.grad is not None
    }


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.named_weights()}


def _relative_distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    distance = sum(float((left[name] - right[name]).double().square().sum()) for name in left)
    size = sum(float(tensor.double().square().sum()) for tensor in right.values())
    return math.sqrt(distance / size)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_gradients_are_the_same_over_1_2_5_and_8_micro_batches(
    tmp_path: Path, kind: str, aggregation: str
) -> None:
    folder = write_tiny_llama(tmp_path, seed=4, initializer_range=USUAL_INITIALIZER_RANGE)
    batch = _batch(_trainer(folder, kind))
    loss_spec: LossSpec = (POLICY_LOSS if kind == "policy" else VALUE_LOSS).model_copy(
        update={"aggregation": aggregation}
    )
    # Sequences of 7, 11, 2, 16, 4, 16, 12 and 11 tokens: these budgets give those cuts.
    budgets = {1: 10_000, 2: 64, 5: 18, 8: 1}
    found: dict[int, tuple[dict[str, torch.Tensor], dict[str, float]]] = {}
    for num_micro_batches, budget in budgets.items():
        trainer = _trainer(folder, kind, micro_batch_tokens=budget)
        if kind == "critic":
            torch.nn.init.normal_(
                trainer.model.head.weight, std=0.1, generator=torch.Generator().manual_seed(1)
            )
        calls: list[int] = []

        def count(_stage: str, done: int, _rows: int, to: list[int] = calls) -> None:
            to.append(done)

        metrics = forward_backward(trainer, batch, loss_spec, count)
        assert len(calls) == num_micro_batches
        found[num_micro_batches] = (_gradients(trainer), metrics)
    for gradients, metrics in found.values():
        assert _relative_distance(gradients, found[1][0]) < CUT_TOLERANCE
        for name, number in metrics.items():
            assert number == pytest.approx(found[1][1][name], rel=1e-5, abs=1e-6), name


def test_gradients_of_two_calls_add_up(folder: Path) -> None:
    once, twice = _trainer(folder), _trainer(folder)
    batch = _batch(once)
    forward_backward(once, batch, POLICY_LOSS)
    forward_backward(twice, batch, POLICY_LOSS)
    forward_backward(twice, batch, POLICY_LOSS)
    doubled = {name: 2 * gradient for name, gradient in _gradients(once).items()}
    assert _relative_distance(_gradients(twice), doubled) < CUT_TOLERANCE


class _Tables(TorchDispatchMode):
    """Counts the gradients of lookups that are as large as the embedding."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.embedding_dense_backward.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("max_tokens", [2048, 24])
def test_a_tied_embedding_makes_no_table_of_its_own_for_its_gradient(
    folder: Path, max_tokens: int
) -> None:
    trainer = _trainer(folder, micro_batch_tokens=max_tokens)
    embedding = trainer.model.lm.get_input_embeddings()
    assert embedding.weight is trainer.model.vocabulary_VD
    batch = _batch(trainer)
    with _Tables() as tables:
        forward_backward(trainer, batch, POLICY_LOSS)
    assert tables.count == 0
    found = _gradients(trainer)

    trainer.drop_gradients()
    embedding.sparse = False
    del embedding.forward
    with _Tables() as tables:
        forward_backward(trainer, batch, POLICY_LOSS)
    assert tables.count > 0  # torch's own way
    expected = _gradients(trainer)

    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.layout == torch.strided
        assert torch.equal(gradient, expected[name])


def test_updates_equal_a_hand_written_loop_with_torchs_adamw(folder: Path) -> None:
    options = {
        "learning_rate": 1e-3,
        "warmup_steps": 3,
        "betas": (0.9, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.1,
        "max_grad_norm": 0.05,
    }
    trainer = _trainer(folder, micro_batch_tokens=30, optimizer=options)
    batches = [_batch(trainer, seed) for seed in range(4)]
    loss_spec = PpoPolicyLossSpec()

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-6,
        foreach=False,
        fused=False,
    )
    for step, batch in enumerate(batches):
        # Plain PPO, row by row, with all logits.
        total = torch.zeros(())
        num_tokens = int(batch["loss_mask"].values.sum())
        rows = zip(
            batch["tokens"].rows(),
            batch["prompt_lengths"].values.tolist(),
            batch["logprobs"].rows(),
            batch["advantages"].rows(),
            batch["loss_mask"].rows(),
            strict=True,
        )
        for tokens, prompt, old, advantages, mask in rows:
            table = model(tokens[None]).logits[0, prompt - 1 : -1].log_softmax(-1)
            ratio = (table.gather(1, tokens[prompt:, None]).squeeze(1) - old).exp()
            losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            total = total + losses[mask].sum() / num_tokens
        total.backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for group in adamw.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 3)
        adamw.step()
        adamw.zero_grad()

        metrics = forward_backward(trainer, batch, loss_spec)
        metrics |= trainer.optim_step()
        assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(float(expected_norm), rel=1e-4)
        assert metrics["learning_rate"] == pytest.approx(1e-3 * min(1.0, (step + 1) / 3))
    assert trainer.policy_version == 4
    expected = dict(model.named_parameters())
    for name, weight in trainer.named_weights():
        torch.testing.assert_close(weight, expected[name].detach(), rtol=0, atol=LOOP_TOLERANCE)


def test_a_learning_rate_may_be_given_for_one_step(folder: Path) -> None:
    trainer = _trainer(folder)
    before = _weights(trainer)
    forward_backward(trainer, _batch(trainer), POLICY_LOSS)
    assert trainer.optim_step(learning_rate=0.0)["learning_rate"] == 0.0
    assert trainer.policy_version == 1
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.named_weights())


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert [warmed_up(8.0, step, 4) for step in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert warmed_up(8.0, 0, 0) == 8.0


def test_update_takes_each_row_once_an_epoch_and_follows_its_seed(folder: Path) -> None:
    def run(seed: int) -> tuple[dict[str, float], dict[str, torch.Tensor], list[Any]]:
        trainer = _trainer(folder)
        calls: list[Any] = []
        metrics = update_whole(
            trainer,
            _batch(trainer),
            PpoPolicyLossSpec(),
            epochs=2,
            mini_batch_rows=3,
            seed=seed,
            progress=lambda *call: calls.append(call),
        )
        assert trainer.policy_version == metrics["optimizer_steps"] == 6
        return metrics, _weights(trainer), calls

    metrics, weights, calls = run(seed=1)
    assert calls[-1] == ("update", 16, 16)
    assert run(seed=1)[0] == metrics
    assert _relative_distance(run(seed=1)[1], weights) == 0
    assert _relative_distance(run(seed=2)[1], weights) > 0


def test_update_reports_means_maxima_and_the_sampler_difference_before_any_step(
    folder: Path,
) -> None:
    trainer, stepper = _trainer(folder), _trainer(folder)
    batch = _batch(trainer)
    metrics = update_whole(trainer, batch, PpoPolicyLossSpec(), epochs=1, mini_batch_rows=4, seed=3)

    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    by_hand = []
    for rows in torch.split(order, 4):
        by_hand.append(forward_backward(stepper, batch.select(rows), PpoPolicyLossSpec()))
        by_hand[-1] |= stepper.optim_step()
    assert metrics["loss"] == pytest.approx((by_hand[0]["loss"] + by_hand[1]["loss"]) / 2)
    assert metrics["ratio_max"] == max(one["ratio_max"] for one in by_hand)
    for name in ("sampler_logprob_diff_mean", "sampler_logprob_diff_max", "entropy"):
        assert metrics[name] == by_hand[0][name]
        assert by_hand[0][name] != by_hand[1][name]


def test_an_entropy_that_no_loss_needs_is_computed_in_the_first_mini_batch_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(folder, micro_batch_tokens=20)
    batch = _batch(trainer)
    seen: list[bool] = []
    finish = trainer.model.finish

    def recording(*args: Any, with_entropy: bool, **kwargs: Any) -> Any:
        seen.append(with_entropy)
        return finish(*args, with_entropy=with_entropy, **kwargs)

    monkeypatch.setattr(trainer.model, "finish", recording)
    metrics = update_whole(trainer, batch, PpoPolicyLossSpec(), epochs=2, mini_batch_rows=4, seed=3)
    assert metrics["entropy"] > 0
    first = seen.index(False)
    assert seen == [True] * first + [False] * (len(seen) - first)
    assert 2 <= first < len(seen) / 2
    seen.clear()
    update_whole(trainer, batch, POLICY_LOSS, epochs=1, mini_batch_rows=4, seed=3)
    assert all(seen)


def test_outputs_of_a_gradient_pass_are_the_scores_in_the_batchs_order(folder: Path) -> None:
    trainer = _trainer(folder, micro_batch_tokens=20)
    batch = _batch(trainer)
    _, outputs = trainer.forward_backward(batch, POLICY_LOSS, plan_whole(trainer, batch))
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    assert torch.equal(outputs["logprobs"].values, scored.values)
    assert outputs["logprobs"].lengths().tolist() == scored.lengths().tolist()


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_training_raises_the_likelihood_of_rewarded_tokens(
    folder: Path, compute_dtype: str
) -> None:
    trainer = _trainer(folder, compute_dtype=compute_dtype)
    batch = _batch(trainer)
    before = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    advantages = Column(ColumnKind.COMPLETION, torch.ones_like(before.values), before.offsets)
    batch = batch | Experience({"advantages": advantages, "logprobs": before})
    update_whole(
        trainer, batch, PpoPolicyLossSpec(clip_high=9.0), epochs=4, mini_batch_rows=8, seed=0
    )
    after = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    mask = batch["loss_mask"].values
    # 4 steps of 1e-3 on a model that is far from certain: well over a nat, no matter of luck.
    assert float((after.values - before.values)[mask].mean()) > 1.0


def test_a_loss_without_gradients_is_that_of_training_and_changes_nothing(folder: Path) -> None:
    trainer, other = (_trainer(folder, micro_batch_tokens=20) for _ in range(2))
    batch = _batch(trainer)
    before = _weights(trainer)
    found, outputs = trainer.forward_backward(
        batch, POLICY_LOSS, plan_whole(trainer, batch), without_gradients=True
    )
    expected, scored = other.forward_backward(batch, POLICY_LOSS, plan_whole(other, batch))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(outputs["logprobs"].values, scored["logprobs"].values)
    assert _gradients(trainer) == {}
    assert _relative_distance(_weights(trainer), before) == 0
    with pytest.raises(NoGradientError):
        trainer.optim_step()
    assert trainer.policy_version == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_loss_without_gradients_leaves_those_that_are_there(folder: Path, fails: bool) -> None:
    trainer = _trainer(folder)
    batch = _batch(trainer)
    forward_backward(trainer, batch, POLICY_LOSS)
    before = {name: gradient.clone() for name, gradient in _gradients(trainer).items()}
    assert before
    if fails:
        advantages = batch["advantages"]
        nan = Column(
            ColumnKind.COMPLETION, torch.full_like(advantages.values, math.nan), advantages.offsets
        )
        with pytest.raises(LossNotFiniteError, match=r"loss is nan .*\): look for"):
            forward_backward(
                trainer,
                batch | Experience({"advantages": nan}),
                POLICY_LOSS,
                without_gradients=True,
            )
    else:
        forward_backward(trainer, batch, POLICY_LOSS, without_gradients=True)
    assert _relative_distance(_gradients(trainer), before) == 0
    trainer.optim_step()
    assert trainer.policy_version == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_drops_gradients_and_moves_no_weight(
    folder: Path, bad: float
) -> None:
    trainer = _trainer(folder, micro_batch_tokens=20)
    batch = _batch(trainer)
    before = _weights(trainer)
    spoiled = batch["advantages"].values.clone()
    spoiled[batch["loss_mask"].values.nonzero()[-1]] = bad
    column = Column(ColumnKind.COMPLETION, spoiled, batch["advantages"].offsets)
    with pytest.raises(LossNotFiniteError, match="gradients were dropped, weights not touched"):
        forward_backward(trainer, batch | Experience({"advantages": column}), POLICY_LOSS)
    assert _gradients(trainer) == {}
    assert trainer.policy_version == 0
    with pytest.raises(NoGradientError):
        trainer.optim_step()
    assert _relative_distance(_weights(trainer), before) == 0
    forward_backward(trainer, batch, POLICY_LOSS)
    trainer.optim_step()
    assert trainer.policy_version == 1


def test_a_pass_that_fails_half_way_leaves_no_gradient_behind(folder: Path) -> None:
    trainer = Trainer.policy(
        ModelSpec(path=folder, compute_dtype="float32", micro_batch_tokens=1), OptimizerSpec()
    )

    def leave(stage: str, done: int, total: int) -> None:
        raise ConnectionError("the caller is gone")

    with pytest.raises(ConnectionError):
        forward_backward(trainer, _batch(trainer), PpoPolicyLossSpec(), leave)
    assert all(weight.grad is None for weight in trainer.model.parameters())
    with pytest.raises(NoGradientError):
        trainer.optim_step()


def test_a_gradient_that_is_not_finite_moves_no_weight_and_is_named(folder: Path) -> None:
    trainer = _trainer(folder)
    before = _weights(trainer)
    forward_backward(trainer, _batch(trainer), POLICY_LOSS)
    norm = trainer.model.lm.get_parameter("model.norm.weight")
    norm.grad[3] = math.nan
    with pytest.raises(LossNotFiniteError, match=r"first in \['model\.norm\.weight'\]"):
        trainer.optim_step()
    assert trainer.policy_version == 0
    assert _gradients(trainer) == {}
    assert _relative_distance(_weights(trainer), before) == 0


def test_a_row_that_is_all_masked_gives_no_gradient(folder: Path) -> None:
    trainer = _trainer(folder)
    batch = _batch(trainer)
    none = Column(
        ColumnKind.COMPLETION,
        torch.zeros_like(batch["loss_mask"].values),
        batch["loss_mask"].offsets,
    )
    forward_backward(trainer, batch | Experience({"loss_mask": none}), POLICY_LOSS)
    assert all(float(gradient.abs().max()) == 0 for gradient in _gradients(trainer).values())


def test_the_wrong_loss_an_empty_batch_and_a_missing_column_are_refused(folder: Path) -> None:
    trainer = _trainer(folder)
    batch = _batch(trainer)
    with pytest.raises(ValueError, match="a value loss needs a value model, but this policy"):
        forward_backward(trainer, batch, VALUE_LOSS)
    with pytest.raises(ValueError, match="compute_values needs a value model"):
        trainer.compute_values(batch)
    with pytest.raises(ValueError, match="0 rows"):
        forward_backward(trainer, batch.slice(0, 0), POLICY_LOSS)
    with pytest.raises(ColumnMissingError, match="'advantages'"):
        forward_backward(
            trainer,
            batch.require(["tokens", "prompt_lengths", "logprobs", "loss_mask"]),
            POLICY_LOSS,
        )
    with pytest.raises(ValueError, match="epochs is 0"):
        update_whole(trainer, batch, POLICY_LOSS, epochs=0, mini_batch_rows=1, seed=0)
    with pytest.raises(ValueError, match="mini_batch_rows is 0"):
        update_whole(trainer, batch, POLICY_LOSS, epochs=1, mini_batch_rows=0, seed=0)


def test_a_checkpoint_is_refused_while_gradients_are_pending(folder: Path, tmp_path: Path) -> None:
    trainer = _trainer(folder)
    forward_backward(trainer, _batch(trainer), POLICY_LOSS)
    with pytest.raises(GradientPendingError, match="optim_step or drop_gradients"):
        trainer.save(tmp_path / "checkpoint")
    trainer.drop_gradients()
    trainer.save(tmp_path / "checkpoint")


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_stepping_parameters_in_groups_changes_no_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # What offload does on a GPU, by streams that are as late as they may be.
    options = {"type": kind, "max_grad_norm": 0.05}
    once = _trainer(folder, optimizer=options)
    monkeypatch.setattr(Optimizer, "is_offloaded", property(lambda self: self.spec.offload))
    monkeypatch.setattr(optimizer, "OFFLOAD_BYTES", 40_000)
    monkeypatch.setattr(matrix_owners, "ROUND_BYTES", 40_000)
    grouped = _trainer(folder, optimizer={**options, "offload": True})
    # Bytes of moments: two of each weight, or Muon's one.
    groups = [
        sum(weight.nbytes for group in one.param_groups for weight in group["params"])
        * (2 if isinstance(one, torch.optim.AdamW) else 1)
        for one in grouped._optimizer._groups
    ]
    assert len(groups) > 3
    resumed = _trainer(folder, optimizer={**options, "offload": True})
    batch, places = _batch(once), set()
    for step in range(3):
        for trainer in (once, grouped, resumed):
            forward_backward(trainer, batch, POLICY_LOSS)
        once.optim_step()
        for trainer in (grouped, resumed):
            with FakeStreams(monkeypatch) as cuda:
                trainer.optim_step()
            # Those of two groups at a time.
            neighbours = max(map(sum, pairwise(groups)))
            assert cuda.most_made_bytes == (neighbours if step else 0)
            num_moments = sum(len(once.optimizer_state(moment)) for moment in MOMENTS)
            assert cuda.log.count("copy") == (2 if step else 1) * num_moments
        states = {name: grouped._optimizer.state(name) for name in STATE_NAMES}
        places.add(tuple(state.data_ptr() for state in states["exp_avg"].values()))
        resumed._optimizer.restore(states, step + 1)
    assert len(places) == 1, "moments were given other memory"
    for trainer in (grouped, resumed):
        for name, weight in trainer.named_weights():
            assert torch.equal(weight, _weights(once)[name]), name
        for moment in STATE_NAMES:
            found, expected = trainer.optimizer_state(moment), once.optimizer_state(moment)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_offload_changes_nothing_on_a_cpu(folder: Path) -> None:
    trainer = _trainer(folder, optimizer={"offload": True})
    assert not trainer._optimizer.is_offloaded
    forward_backward(trainer, _batch(trainer), POLICY_LOSS)
    trainer.optim_step()
    assert len(trainer._optimizer._adamws) == 1
