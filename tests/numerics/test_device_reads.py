"""An update, and scoring, wait for their device as often whatever the number of micro-batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device_reads import IMAGINED, DeviceReads
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch, with_shared_prompts
from support.updates import update_whole

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.models.classifier import Classifier
from rolemesh.engine.specs import (
    BradleyTerryLossSpec,
    CispoPolicyLossSpec,
    ClassifierRewardSpec,
    ClipCovPolicyLossSpec,
    DpoLossSpec,
    DppoPolicyLossSpec,
    GmpoPolicyLossSpec,
    GspoPolicyLossSpec,
    KtoLossSpec,
    LossSpec,
    MaskingSpec,
    ModelSpec,
    OptimizerSpec,
    PpoPolicyLossSpec,
    PpoValueLossSpec,
    SapoPolicyLossSpec,
    SftLossSpec,
    TokenTruncationSpec,
    VespoPolicyLossSpec,
)
from rolemesh.engine.train.trainer import Trainer

LOSSES: dict[str, LossSpec] = {
    "ppo": PpoPolicyLossSpec(
        entropy_coefficient=0.01, kl_in_loss=0.1, dual_clip=3.0, off_policy=TokenTruncationSpec()
    ),
    "ppo by rows": PpoPolicyLossSpec(aggregation="seq_mean_token_mean"),
    "gspo": GspoPolicyLossSpec(off_policy=MaskingSpec(level="sequence", normalize="batch")),
    "cispo": CispoPolicyLossSpec(),
    "dppo": DppoPolicyLossSpec(divergence="kl"),
    "sapo": SapoPolicyLossSpec(),
    "gmpo": GmpoPolicyLossSpec(),
    "vespo": VespoPolicyLossSpec(),
    "clip-cov": ClipCovPolicyLossSpec(covariance_share=0.2, covariance_low=0.0),
    "values": PpoValueLossSpec(),
    "sft": SftLossSpec(),
    "dpo": DpoLossSpec(log_ratio="mean"),
    "kto": KtoLossSpec(),
    "bradley-terry": BradleyTerryLossSpec(centering=0.1),
}
ONE_PASS, MANY_PASSES = 10_000, 20
"""Tokens of a pass: all 24 rows are in one, or in eight at least."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), num_layers=1)


def whole_batch() -> Experience:
    """Each loss's columns, of 24 rows that are 12 pairs; two and two share their prompts."""
    batch = token_batch(prompt_lengths=(3, 3, 1, 1, 7, 7) * 4, completion_lengths=(4, 6, 1, 9) * 6)
    values = batch["values"].values
    offsets = batch["values"].offsets
    assert offsets is not None
    names = ("logprobs", "proximal_logprobs", "reference_logprobs")
    return with_shared_prompts(batch, 2) | Experience(
        {
            **{name: Column(ColumnKind.COMPLETION, values - 6, offsets) for name in names},
            "policy_versions": Column(ColumnKind.COMPLETION, -torch.arange(len(values)), offsets),
            "pair_ids": Column(ColumnKind.ROW, torch.arange(24) // 2),
            "preference": Column(ColumnKind.ROW, 1.0 - 2 * (torch.arange(24) % 2)),
            "kl_reference_point": Column(ColumnKind.ROW, torch.full((24,), 0.1)),
        }
    )


def trainer_of(folder: Path, loss: LossSpec, micro_batch_tokens: int, shares: str) -> Trainer:
    model = ModelSpec(
        path=folder,
        compute_dtype="float32",
        micro_batch_tokens=micro_batch_tokens,
        **{"share_prefixes": shares},
    )
    optimizer = OptimizerSpec(learning_rate=1e-3)
    if isinstance(loss, PpoValueLossSpec):
        return Trainer.critic(model, optimizer, device=IMAGINED)
    if isinstance(loss, BradleyTerryLossSpec):
        source = ClassifierRewardSpec(model=model, new_head=True)
        return Trainer.reward(source, optimizer, device=IMAGINED)
    return Trainer.policy(model, optimizer, device=IMAGINED)


def counted(trainer: Trainer, compute: Any) -> tuple[Counter[str], Counter[str], int]:
    """Reads, uploads that wait, and forward passes."""
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    hook = trainer.rank_model.register_forward_pre_hook(count)
    with DeviceReads(trainer.rank_model) as device:
        compute()
    hook.remove()
    return device.reads, device.waits, passes


@pytest.mark.parametrize(
    ("name", "shares"), [*((name, "never") for name in LOSSES), ("ppo", "auto"), ("values", "auto")]
)
def test_reads_of_an_update_do_not_grow_with_micro_batches(
    folder: Path, name: str, shares: str
) -> None:
    loss, batch = LOSSES[name], whole_batch()
    pairs = {"rows_per_unit": 2} if name in ("dpo", "bradley-terry") else {}
    found = []
    for tokens in (ONE_PASS, MANY_PASSES):
        trainer = trainer_of(folder, loss, tokens, shares)
        arguments = {"epochs": 1, "mini_batch_rows": 24, "seed": 0, **pairs}
        found.append(
            counted(trainer, lambda: update_whole(trainer, batch, loss, **arguments))  # noqa: B023
        )
    (reads, waits, passes), (more_reads, more_waits, more_passes) = found
    assert more_passes >= passes + 7
    assert more_reads == reads
    assert more_waits == waits
    # The metrics and outputs of a mini-batch, its loss's gradient norm, and their checks.
    assert 2 <= sum(reads.values()) <= 6


@pytest.mark.parametrize("shares", ["never", "auto"])
def test_reads_of_scoring_do_not_grow_with_micro_batches(folder: Path, shares: str) -> None:
    for loss in (LOSSES["sft"], LOSSES["values"]):
        for tokens in (ONE_PASS, MANY_PASSES):
            trainer = trainer_of(folder, loss, tokens, shares)

            def score() -> None:
                if trainer.kind == "critic":  # noqa: B023
                    trainer.compute_values(whole_batch())  # noqa: B023
                else:
                    trainer.compute_logprobs(  # noqa: B023
                        whole_batch(), temperature=1.0, with_entropy=True
                    )

            reads, waits, passes = counted(trainer, score)
            assert passes == 1 or passes >= 8
            assert (reads, waits) == (Counter({"cpu": 1}), Counter())


def test_a_classifiers_scores_come_in_one_read(folder: Path) -> None:
    trainer = trainer_of(folder, LOSSES["bradley-terry"], MANY_PASSES, "never")
    rows = [row.tolist() for row in whole_batch()["tokens"].rows()]
    classifier = Classifier(trainer.model.spec, trained=trainer.rank_model, device=IMAGINED)
    reads, waits, passes = counted(trainer, lambda: classifier.score(rows))
    assert passes >= 8
    assert (reads, waits) == (Counter({"cpu": 1}), Counter())


def test_the_imagined_device_notices_what_would_wait() -> None:
    linear = torch.nn.Linear(1, 3, bias=False)
    linear.weight.data.fill_(1.0)
    with DeviceReads(linear) as device:
        there = 2 * linear.weight.detach().flatten()
        host = torch.arange(3.0)
        assert float(there.sum()) == 6
        there[there > 1].sum()
        there.tolist()
        host.tolist()
        host[host > 1].sum()
        there + host.to(there.device)
        there + host.to(there.device, non_blocking=True)
        host.to(host.device)
        torch.arange(3).repeat_interleave(there.long())
    assert device.reads == {
        "_local_scalar_dense": 1,
        "index": 1,
        "tolist": 1,
        "repeat_interleave": 1,
    }
    assert device.waits == {"to": 1}
