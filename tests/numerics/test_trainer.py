"""The trainer against a hand-written loop, and against itself with other cuts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fake_streams import FakeStreams
from support.small_trainers import (
    POLICY_LOSS,
    VALUE_LOSS,
    batch_near,
    gradients_of,
    relative_distance,
    small_trainer,
    weights_of,
)
from support.tiny_models import write_tiny_llama
from support.updates import forward_backward, plan_whole, update_whole
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.parallel import matrix_owners
from rolemesh.engine.specs import LossSpec, PpoPolicyLossSpec
from rolemesh.engine.train.optimizers import optimizer
from rolemesh.engine.train.optimizers.host_moments import MOMENTS, STATE_NAMES
from rolemesh.engine.train.optimizers.optimizer import Optimizer, warmed_up

CUT_TOLERANCE = 1e-6
"""Relative, of the norm: the same float32 products in other blocks. Each cut by itself is 4e-7
away from float64 at transformers' usual width of weights, and 1.3e-6 at that of `folder`."""
USUAL_INITIALIZER_RANGE = 0.02
LOOP_TOLERANCE = 1e-5
"""A step of 1e-3 scaled by a ratio of moments that differs in the last bits of float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=4)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_gradients_are_the_same_over_1_2_5_and_8_micro_batches(
    tmp_path: Path, kind: str, aggregation: str
) -> None:
    folder = write_tiny_llama(tmp_path, seed=4, initializer_range=USUAL_INITIALIZER_RANGE)
    batch = batch_near(small_trainer(folder, kind))
    loss_spec: LossSpec = (POLICY_LOSS if kind == "policy" else VALUE_LOSS).model_copy(
        update={"aggregation": aggregation}
    )
    # Sequences of 7, 11, 2, 16, 4, 16, 12 and 11 tokens: these budgets give those cuts.
    budgets = {1: 10_000, 2: 64, 5: 18, 8: 1}
    found: dict[int, tuple[dict[str, torch.Tensor], dict[str, float]]] = {}
    for num_micro_batches, budget in budgets.items():
        trainer = small_trainer(folder, kind, micro_batch_tokens=budget)
        if kind == "critic":
            torch.nn.init.normal_(
                trainer.model.head.weight, std=0.1, generator=torch.Generator().manual_seed(1)
            )
        calls: list[int] = []

        def count(_stage: str, done: int, _rows: int, to: list[int] = calls) -> None:
            to.append(done)

        metrics = forward_backward(trainer, batch, loss_spec, count)
        assert len(calls) == num_micro_batches
        found[num_micro_batches] = (gradients_of(trainer), metrics)
    for gradients, metrics in found.values():
        assert relative_distance(gradients, found[1][0]) < CUT_TOLERANCE
        for name, number in metrics.items():
            assert number == pytest.approx(found[1][1][name], rel=1e-5, abs=1e-6), name


def test_gradients_of_two_calls_add_up(folder: Path) -> None:
    once, twice = small_trainer(folder), small_trainer(folder)
    batch = batch_near(once)
    forward_backward(once, batch, POLICY_LOSS)
    forward_backward(twice, batch, POLICY_LOSS)
    forward_backward(twice, batch, POLICY_LOSS)
    doubled = {name: 2 * gradient for name, gradient in gradients_of(once).items()}
    assert relative_distance(gradients_of(twice), doubled) < CUT_TOLERANCE


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
    trainer = small_trainer(folder, micro_batch_tokens=max_tokens)
    embedding = trainer.model.lm.get_input_embeddings()
    assert embedding.weight is trainer.model.vocabulary_VD
    batch = batch_near(trainer)
    with _Tables() as tables:
        forward_backward(trainer, batch, POLICY_LOSS)
    assert tables.count == 0
    found = gradients_of(trainer)

    trainer.drop_gradients()
    embedding.sparse = False
    del embedding.forward
    with _Tables() as tables:
        forward_backward(trainer, batch, POLICY_LOSS)
    assert tables.count > 0  # torch's own way
    expected = gradients_of(trainer)

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
    trainer = small_trainer(folder, micro_batch_tokens=30, optimizer=options)
    batches = [batch_near(trainer, seed) for seed in range(4)]
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
    trainer = small_trainer(folder)
    before = weights_of(trainer)
    forward_backward(trainer, batch_near(trainer), POLICY_LOSS)
    assert trainer.optim_step(learning_rate=0.0)["learning_rate"] == 0.0
    assert trainer.policy_version == 1
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.named_weights())


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert [warmed_up(8.0, step, 4) for step in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert warmed_up(8.0, 0, 0) == 8.0


def test_update_takes_each_row_once_an_epoch_and_follows_its_seed(folder: Path) -> None:
    def run(seed: int) -> tuple[dict[str, float], dict[str, torch.Tensor], list[Any]]:
        trainer = small_trainer(folder)
        calls: list[Any] = []
        metrics = update_whole(
            trainer,
            batch_near(trainer),
            PpoPolicyLossSpec(),
            epochs=2,
            mini_batch_rows=3,
            seed=seed,
            progress=lambda *call: calls.append(call),
        )
        assert trainer.policy_version == metrics["optimizer_steps"] == 6
        return metrics, weights_of(trainer), calls

    metrics, weights, calls = run(seed=1)
    assert calls[-1] == ("update", 16, 16)
    assert run(seed=1)[0] == metrics
    assert relative_distance(run(seed=1)[1], weights) == 0
    assert relative_distance(run(seed=2)[1], weights) > 0


def test_update_reports_means_maxima_and_the_sampler_difference_before_any_step(
    folder: Path,
) -> None:
    trainer, stepper = small_trainer(folder), small_trainer(folder)
    batch = batch_near(trainer)
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
    trainer = small_trainer(folder, micro_batch_tokens=20)
    batch = batch_near(trainer)
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
    trainer = small_trainer(folder, micro_batch_tokens=20)
    batch = batch_near(trainer)
    _, outputs = trainer.forward_backward(batch, POLICY_LOSS, plan_whole(trainer, batch))
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    assert torch.equal(outputs["logprobs"].values, scored.values)
    assert outputs["logprobs"].lengths().tolist() == scored.lengths().tolist()


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_training_raises_the_likelihood_of_rewarded_tokens(
    folder: Path, compute_dtype: str
) -> None:
    trainer = small_trainer(folder, compute_dtype=compute_dtype)
    batch = batch_near(trainer)
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


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_stepping_parameters_in_groups_changes_no_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # What offload does on a GPU, by streams that are as late as they may be.
    options = {"type": kind, "max_grad_norm": 0.05}
    once = small_trainer(folder, optimizer=options)
    monkeypatch.setattr(Optimizer, "is_offloaded", property(lambda self: self.spec.offload))
    monkeypatch.setattr(optimizer, "OFFLOAD_BYTES", 40_000)
    monkeypatch.setattr(matrix_owners, "ROUND_BYTES", 40_000)
    grouped = small_trainer(folder, optimizer={**options, "offload": True})
    # Bytes of moments: two of each weight, or Muon's one.
    groups = [
        sum(weight.nbytes for group in one.param_groups for weight in group["params"])
        * (2 if isinstance(one, torch.optim.AdamW) else 1)
        for one in grouped._optimizer._groups
    ]
    assert len(groups) > 3
    resumed = small_trainer(folder, optimizer={**options, "offload": True})
    batch, places = batch_near(once), set()
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
            assert torch.equal(weight, weights_of(once)[name]), name
        for moment in STATE_NAMES:
            found, expected = trainer.optimizer_state(moment), once.optimizer_state(moment)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_offload_changes_nothing_on_a_cpu(folder: Path) -> None:
    trainer = small_trainer(folder, optimizer={"offload": True})
    assert not trainer._optimizer.is_offloaded
    forward_backward(trainer, batch_near(trainer), POLICY_LOSS)
    trainer.optim_step()
    assert len(trainer._optimizer._adamws) == 1
