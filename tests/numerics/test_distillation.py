"""A teacher's say: what it finds likeliest, the divergence from it, and advantages made of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parallel_training import Job, assert_agree, train
from support.parallel_training import joined as join
from support.ragged_batches import mixed_masks, random_batch
from support.rank_processes import RankContext, RankPool
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch

from rolemesh.engine.algorithms.estimators.estimation import estimate_advantages
from rolemesh.engine.algorithms.losses.base import LossScale, ModelOutputs, make_loss
from rolemesh.engine.algorithms.losses.distillation import SMALLEST_TAIL, divergence, with_tail
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring import compute_logprobs
from rolemesh.engine.models.vocabulary.top_logprobs import top_logprobs
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import DistillationLossSpec, ModelSpec, ReverseKlSpec
from rolemesh.engine.specs.columns import (
    TEACHER_LOGPROBS,
    teacher_voices,
    top_column,
    top_ids_column,
    weights_column,
)

SPECS = {
    "forward_kl": DistillationLossSpec(divergence="forward_kl"),
    "reverse_kl": DistillationLossSpec(),
    "jensen_shannon": DistillationLossSpec(divergence="jensen_shannon", mixture=0.3),
    "jensen_shannon_half": DistillationLossSpec(divergence="jensen_shannon"),
}
EVERY_SPEC = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
VOCABULARY = 512
TOP, TOP_IDS = top_column(TEACHER_LOGPROBS), top_ids_column(TEACHER_LOGPROBS)
TOP_K = 5


def _by_hand(teacher: list[float], policy: list[float], spec: DistillationLossSpec) -> float:
    """The divergence from probabilities of all outcomes, one at a time."""

    def kl(of: list[float], to: list[float]) -> float:
        return sum(p * math.log(p / q) for p, q in zip(of, to, strict=True))

    if spec.divergence == "forward_kl":
        return kl(teacher, policy)
    if spec.divergence == "reverse_kl":
        return kl(policy, teacher)
    share = spec.mixture or 0.5
    mixed = [share * p + (1 - share) * q for p, q in zip(teacher, policy, strict=True)]
    return share * kl(teacher, mixed) + (1 - share) * kl(policy, mixed)


@EVERY_SPEC
def test_a_divergence_is_that_of_its_outcomes(spec: DistillationLossSpec) -> None:
    logits = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    teacher, policy = torch.log_softmax(logits, -1)
    found = divergence(with_tail(teacher[:, :4]), with_tail(policy[:, :4]), spec)
    for row in range(6):
        outcomes = [
            [*one[row, :4].exp().tolist(), float(one[row, 4:].exp().sum())]
            for one in (teacher, policy)
        ]
        assert float(found[row]) == pytest.approx(_by_hand(*outcomes, spec), rel=1e-12)


@EVERY_SPEC
def test_of_all_tokens_the_gradient_is_that_of_the_whole_distribution(
    spec: DistillationLossSpec,
) -> None:
    # K = V - 1 tokens, and the last as the tail: nothing is left out.
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 9, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.log_softmax(torch.randn(6, 9, generator=generator, dtype=torch.float64), -1)
    order = teacher.argsort(1, descending=True)
    chosen = torch.log_softmax(logits, -1).gather(1, order[:, :8])
    divergence(with_tail(teacher.gather(1, order[:, :8])), with_tail(chosen), spec).sum().backward()
    found, logits.grad = logits.grad, None
    policy = torch.log_softmax(logits, -1)
    divergence(teacher, policy, spec).sum().backward()
    torch.testing.assert_close(found, logits.grad, rtol=1e-10, atol=1e-12)


@EVERY_SPEC
def test_equal_distributions_are_no_loss_and_no_gradient(spec: DistillationLossSpec) -> None:
    logprobs = torch.log_softmax(torch.randn(4, 9), -1)[:, :3].requires_grad_()
    found = divergence(with_tail(logprobs.detach()), with_tail(logprobs), spec)
    found.sum().backward()
    torch.testing.assert_close(found, torch.zeros(4), rtol=0, atol=1e-7)
    # The reverse KL and its mixture move by the score of all outcomes alone, which sums to nothing
    # over the logits behind; log-probs taken one by one show it.
    if spec.divergence == "reverse_kl":
        assert logprobs.grad is not None
        torch.testing.assert_close(logprobs.grad, torch.zeros(4, 3), rtol=0, atol=1e-6)


@EVERY_SPEC
def test_a_teacher_without_a_tail_gives_finite_numbers(spec: DistillationLossSpec) -> None:
    teacher = torch.tensor([[0.0, -40.0], [-1e-9, -25.0]])
    policy = torch.tensor([[-30.0, -0.1], [-1e-9, -30.0]], requires_grad=True)
    found = divergence(with_tail(teacher), with_tail(policy), spec)
    found.sum().backward()
    assert found.isfinite().all()
    assert policy.grad is not None
    assert policy.grad.isfinite().all()
    assert float(with_tail(teacher)[0, 2].exp()) == pytest.approx(SMALLEST_TAIL)


@EVERY_SPEC
def test_micro_batches_and_masked_tokens_change_nothing(spec: DistillationLossSpec) -> None:
    batch = random_batch(mixed_masks(seed=3), {"advantages": (-1.0, 1.0)}, seed=4)
    whole = batch.experience(torch.float64)
    mask = whole["loss_mask"]
    num_tokens = len(mask.values)
    generator = torch.Generator().manual_seed(5)
    teacher, policy = torch.log_softmax(
        torch.randn(2, num_tokens, 9, generator=generator, dtype=torch.float64), -1
    )[..., :4]
    spec = spec.model_copy(update={"aggregation": "seq_mean_token_mean"})
    loss = make_loss(spec)

    def run(rows: list[list[int]], policy: torch.Tensor) -> tuple[float, torch.Tensor]:
        leaf = policy.clone().requires_grad_()
        experience = whole | Experience(
            {
                TOP: Column(ColumnKind.COMPLETION, teacher, mask.offsets),
                TOP_IDS: Column(
                    ColumnKind.COMPLETION,
                    torch.zeros(num_tokens, 4, dtype=torch.int32),
                    mask.offsets,
                ),
                "place": Column(ColumnKind.COMPLETION, torch.arange(num_tokens), mask.offsets),
            }
        )
        total = 0.0
        for part in rows:
            cut = experience.select(torch.tensor(part))
            outputs = ModelOutputs(choices_NK=leaf[cut["place"].values])
            share, _ = loss(outputs, cut, LossScale.of(whole))
            share.backward()
            total += float(share.detach())
        assert leaf.grad is not None
        return total, leaf.grad

    every = list(range(whole.num_rows))
    at_once = run([every], policy)
    cut = run([every[:3], every[3:5], every[5:]], policy)
    assert cut[0] == pytest.approx(at_once[0], rel=1e-12)
    torch.testing.assert_close(cut[1], at_once[1], rtol=1e-12, atol=0)
    other = torch.where(mask.values[:, None], policy, policy - 1)
    assert run([every], other)[0] == at_once[0]
    assert not at_once[1][~mask.values].any()


@EVERY_SPEC
def test_the_loss_to_several_teachers_is_the_mean_of_those_to_each(
    spec: DistillationLossSpec,
) -> None:
    whole = random_batch(mixed_masks(seed=3), {}, seed=4).experience(torch.float64)
    mask = whole["loss_mask"]
    generator = torch.Generator().manual_seed(5)
    shape = (4, len(mask.values), 9)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    # Each teacher has tokens of its own, so that the policy has three choices of 3 columns.
    *teachers, policy = torch.log_softmax(logits, -1).split([1, 1, 1, 1])
    weights_BT = torch.rand(whole.num_rows, 3, generator=generator, dtype=torch.float64)
    weights_BT[0] = torch.tensor([1.0, 0.0, 0.0])
    weights_BT /= weights_BT.sum(1, keepdim=True)
    columns: dict[str, Column] = {}
    choices, single, metrics = [], [], {"teacher_mass": 0.0, "policy_mass": 0.0}
    total = torch.zeros(())
    for number, (voice, teacher) in enumerate(zip(teacher_voices(3), teachers, strict=True)):
        top = Column(ColumnKind.COMPLETION, teacher[0, :, :3], mask.offsets)
        ids = Column(ColumnKind.COMPLETION, torch.zeros(shape[1], 3).int(), mask.offsets)
        columns |= {top_column(voice): top, top_ids_column(voice): ids}
        columns[weights_column(voice)] = Column(ColumnKind.ROW, weights_BT[:, number])
        choices.append(policy[0, :, number : number + 3].clone().requires_grad_())
        single.append(choices[-1].detach().clone().requires_grad_())
        # One row at a time, with one teacher: the oracle.
        for row in range(whole.num_rows):
            own = Experience({TOP: top, TOP_IDS: ids}) | whole
            cut = own.select(torch.tensor([row]))
            outputs = ModelOutputs(choices_NK=single[-1][mask.offsets[row] : mask.offsets[row + 1]])
            share, found = make_loss(spec)(outputs, cut, LossScale.of(whole))
            total = total + weights_BT[row, number] * share
            for name in metrics:
                metrics[name] += float(weights_BT[row, number] * found[name])
    spec = spec.model_copy(update={"teachers": 3})
    outputs = ModelOutputs(choices_NK=torch.cat(choices, 1))
    loss, told = make_loss(spec)(outputs, whole | Experience(columns), LossScale.of(whole))
    loss.backward()
    total.backward()
    assert loss.item() == pytest.approx(total.item(), rel=1e-12)
    for name, expected in metrics.items():
        assert float(told[name]) == pytest.approx(expected, rel=1e-12)
    for found_NK, expected_NK in zip(choices, single, strict=True):
        torch.testing.assert_close(found_NK.grad, expected_NK.grad, rtol=1e-12, atol=1e-15)


# --- advantages --------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_advantages_are_minus_the_kl_of_each_token_and_of_what_follows(gamma: float) -> None:
    ranges = {"logprobs": (-2.0, 0.0), TEACHER_LOGPROBS: (-2.0, 0.0)}
    batch = random_batch(mixed_masks(seed=6), ranges, seed=7)
    experience = batch.experience(torch.float64)
    spec = ReverseKlSpec(coefficient=0.5, gamma=gamma)
    found, metrics = estimate_advantages(experience, spec)
    names = ("logprobs", TEACHER_LOGPROBS, "loss_mask")
    gaps = []
    for sampled, teacher, mask, advantages in zip(
        *(experience[name].rows() for name in names), found["advantages"].rows(), strict=True
    ):
        expected, following = [0.0] * len(mask), 0.0
        for place in reversed(range(len(mask))):
            if mask[place]:
                gap = float(teacher[place] - sampled[place])
                gaps.append(gap)
                following = 0.5 * gap + gamma * following
                expected[place] = following
        torch.testing.assert_close(advantages, torch.tensor(expected), rtol=1e-6, atol=1e-7)
    assert metrics["kl/teacher"] == pytest.approx(-sum(gaps) / len(gaps), rel=1e-9)


def test_advantages_of_several_teachers_are_the_mean_of_those_of_each() -> None:
    voices = teacher_voices(2)
    ranges = dict.fromkeys(("logprobs", *voices), (-2.0, 0.0))
    batch = random_batch(mixed_masks(seed=6), ranges, seed=7).experience(torch.float64)
    route = {"by": "metadata.d", "to": {"a": "one"}, "default": {"two": 3.0, "one": 1.0}}
    domains = ["ab"[row % 2] for row in range(batch.num_rows)]
    shares = [{"a": (1.0, 0.0), "b": (0.75, 0.25)}[domain] for domain in domains]
    alone = []
    for voice in voices:
        of_one = batch | Experience({TEACHER_LOGPROBS: batch[voice]})
        alone.append(estimate_advantages(of_one, ReverseKlSpec(gamma=0.9))[0]["advantages"])
    columns = {
        weights_column(voice): Column(ColumnKind.ROW, torch.tensor([one[number] for one in shares]))
        for number, voice in enumerate(voices)
    }
    columns["metadata"] = Column.text([json.dumps({"d": domain}) for domain in domains])
    spec = ReverseKlSpec.model_validate({"gamma": 0.9, "route": route})
    found, metrics = estimate_advantages(batch | Experience(columns), spec)
    lengths = found["advantages"].lengths()
    weights_N = torch.tensor(shares).repeat_interleave(lengths, 0)
    expected = weights_N[:, 0] * alone[0].values + weights_N[:, 1] * alone[1].values
    torch.testing.assert_close(found["advantages"].values, expected.float(), rtol=1e-5, atol=1e-6)
    # "one" has the first voice of rows "a", and the second of rows "b".
    gaps: dict[str, list[float]] = {"one": [], "two": []}
    for row, domain in enumerate(domains):
        said = {"a": ("one", None), "b": ("two", "one")}[domain]
        for voice, name in zip(voices, said, strict=True):
            columns_of_row = ([*batch[one].rows()][row] for one in ("logprobs", voice, "loss_mask"))
            for sampled, teacher, mask in zip(*columns_of_row, strict=True):
                if name is not None and mask:
                    gaps[name].append(float(sampled - teacher))
    for name, values in gaps.items():
        assert metrics[f"kl/teacher/{name}"] == pytest.approx(sum(values) / len(values), rel=1e-9)


def test_rewards_are_reported_and_train_nothing() -> None:
    experience = random_batch(
        mixed_masks(seed=6), {"logprobs": (-2.0, 0.0), TEACHER_LOGPROBS: (-2.0, 0.0)}, seed=7
    ).experience(torch.float64)
    plain, _ = estimate_advantages(experience, ReverseKlSpec())
    rewards = Column(ColumnKind.ROW, torch.arange(float(experience.num_rows)))
    found, metrics = estimate_advantages(
        experience | Experience({"rewards": rewards}), ReverseKlSpec()
    )
    assert torch.equal(found["advantages"].values, plain["advantages"].values)
    assert metrics["reward/mean"] == pytest.approx((experience.num_rows - 1) / 2)


# --- models ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_tiny_llama(path, seed=4)
    return path


def _spec(folder: Path, **fields: Any) -> ModelSpec:
    return ModelSpec.model_validate(
        {"path": folder, "compute_dtype": "float32", "micro_batch_tokens": 24, **fields}
    )


def test_the_likeliest_tokens_are_those_of_all_logits(folder: Path) -> None:
    batch = token_batch()
    model = CausalLm(_spec(folder, logprob_chunk_tokens=3), trainable=False)
    scored = compute_logprobs(RankModel(model), batch, temperature=0.8, top_k=TOP_K)
    assert scored["top_ids"].values.dtype == torch.int32
    rows = zip(
        batch["tokens"].rows(),
        batch["prompt_lengths"].values.tolist(),
        *(scored[name].rows() for name in ("logprobs", "top_ids", "top")),
        strict=True,
    )
    for tokens, prompt, logprobs, ids, top in rows:
        logits = model.lm(tokens[None]).logits[0, prompt - 1 : -1] / 0.8
        table = torch.log_softmax(logits, -1)
        expected = table.topk(TOP_K, 1)
        torch.testing.assert_close(top, expected.values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(table.gather(1, ids.long()), top, rtol=1e-5, atol=1e-5)
        assert (top.diff(dim=1) <= 0).all()
        of_targets = table.gather(1, tokens[prompt:, None])[:, 0]
        torch.testing.assert_close(logprobs, of_targets, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("top_k", "with_entropy"), [(-1, False), (VOCABULARY + 1, False), (3, True)]
)
def test_what_cannot_be_told_is_refused(folder: Path, top_k: int, with_entropy: bool) -> None:
    model = RankModel(CausalLm(_spec(folder), trainable=False))
    with pytest.raises(ValueError, match=rf"top_k is {top_k} .* 0 to {VOCABULARY}"):
        compute_logprobs(
            model, token_batch(), temperature=1.0, top_k=top_k, with_entropy=with_entropy
        )


def _told(folder: Path, batch: Experience) -> Experience:
    """What two other models of the same vocabulary say of a batch, of which they share the rows."""
    columns: dict[str, Column] = {}
    share_B = torch.linspace(0, 1, batch.num_rows)
    for seed, voice, weights_B in zip(
        (9, 10), teacher_voices(2), (share_B, 1 - share_B), strict=True
    ):
        teacher = folder.parent / f"teacher-{seed}"
        if not teacher.exists():
            write_tiny_llama(teacher, seed=seed)
        model = RankModel(CausalLm(_spec(teacher), trainable=False))
        scored = compute_logprobs(model, batch, temperature=1.0, top_k=TOP_K)
        columns |= {top_ids_column(voice): scored["top_ids"], top_column(voice): scored["top"]}
        columns[weights_column(voice)] = Column(ColumnKind.ROW, weights_B)
    return Experience(columns)


@pytest.fixture(scope="module")
def job(folder: Path) -> Job:
    batch = token_batch()
    spec = DistillationLossSpec(top_k=TOP_K, teachers=2)
    return Job(folder, batch | _told(folder, batch), spec)


@pytest.mark.parametrize(
    "layout",
    [TrainLayout(tp=2), TrainLayout(pp=2), TrainLayout(dp=2, fsdp=2)],
    ids=["tp2", "pp2", "fsdp2"],
)
def test_three_steps_on_many_ranks_agree_with_one(
    rank_pool: RankPool, job: Job, layout: TrainLayout
) -> None:
    alone = join(rank_pool.run(train, 1, job), TrainLayout())
    spread = replace(job, layout=layout)
    assert_agree(join(rank_pool.run(train, layout.world_size, spread), layout), alone)


def test_rows_that_share_their_beginnings_train_as_if_apart(rank_pool: RankPool, job: Job) -> None:
    batch = token_batch(prompt_lengths=(6,) * 12, completion_lengths=(5,) * 12, seed=3)
    tokens = batch["tokens"]
    rows = [torch.cat([tokens.values[:8], row[8:]]) for row in tokens.rows()]
    batch = batch | Experience({"tokens": Column.ragged(tokens.kind, rows, torch.int64)})
    batch = batch | _told(job.folder, batch)
    found = [
        join(
            rank_pool.run(
                train,
                1,
                replace(job, batch=batch, mini_batch_rows=4, model={"micro_batch_tokens": budget}),
            ),
            TrainLayout(),
        )
        for budget in (64, 12)
    ]
    # One pass of a tree, and a pass for each row.
    assert found[0].metrics["computed_fraction"] < 1 == found[1].metrics["computed_fraction"]
    assert_agree(found[0], found[1])


def _top_of_slice(at: RankContext, hidden: Any, vocabulary: Any, bounds: list[int]) -> Any:
    with at.connect(HybridLayout(TrainLayout(tp=at.world_size))) as mesh:
        first, end = bounds[at.rank], bounds[at.rank + 1]
        targets = torch.arange(len(hidden))
        return top_logprobs(
            hidden, vocabulary[first:end], targets, TOP_K, group=mesh.tp, first_row=first
        )


@pytest.mark.parametrize("bounds", [[0, 20, 37], [0, 0, 37], [0, 3, 37]], ids=str)
def test_slices_of_a_vocabulary_find_the_likeliest_of_all(
    rank_pool: RankPool, bounds: list[int]
) -> None:
    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(11, 6, generator=generator)
    vocabulary = torch.randn(37, 6, generator=generator)
    whole = top_logprobs(hidden, vocabulary, torch.arange(11), TOP_K, group=RankMesh.single().tp)
    for part in rank_pool.run(_top_of_slice, 2, hidden, vocabulary, bounds):
        assert torch.equal(part[1], whole[1])
        for found, expected in zip(part, whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
