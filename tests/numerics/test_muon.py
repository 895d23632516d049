"""Muon against torch's, matrix by matrix, and on many ranks against one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.parallel_training import (
    Job,
    Trained,
    assert_agree,
    joined,
    near_policy,
    policy_job,
    record_gradients,
    train,
)
from support.rank_processes import RankContext, RankPool
from support.tiny_families import write_tiny_decoder
from support.tiny_models import write_tiny_llama
from support.token_batches import token_batch
from support.updates import forward_backward

from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.parallel import matrix_owners
from rolemesh.engine.specs import ModelSpec, MuonSpec, OptimizerSpec, SftLossSpec
from rolemesh.engine.specs.by_device import Device
from rolemesh.engine.train.optimizers import muon
from rolemesh.engine.train.optimizers.newton_schulz import orthogonalised
from rolemesh.engine.train.trainer import Trainer

FLOAT32_TOLERANCE = 1e-4
"""Absolute, of elements of at most 1: five steps multiply what float32 rounds in the smallest
singular values by up to 3.4445 each, 485 in all. Found is 2e-6."""
VOCABULARY = 100


@pytest.mark.parametrize("sizes", [(6, 6), (5, 40), (40, 5)], ids=["square", "wide", "tall"])
def test_singular_values_go_through_the_polynomial_and_nothing_else_changes(
    sizes: tuple[int, int],
) -> None:
    matrix_RC = torch.randn(sizes, generator=torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(matrix_RC.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left @ torch.diag(values) @ right
    assert values.min() > 0.5
    assert values.max() < 1.3
    found = orthogonalised(matrix_RC, steps=5)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=FLOAT32_TOLERANCE)


def test_a_matrix_of_zeros_stays_one() -> None:
    assert torch.equal(orthogonalised(torch.zeros(3, 4), steps=5), torch.zeros(3, 4))


INNER = 16
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "qwen3": (
        {},
        {
            **{f"self_attn.{name}_proj.weight": [...] for name in "qkvo"},
            **{f"mlp.{name}_proj.weight": [...] for name in ("gate", "up", "down")},
        },
    ),
    # 4 query heads and 2 key-value heads of width 8, and an MLP of width 48.
    "phi3": (
        {"bos_token_id": 1, "eos_token_id": 2},
        {
            "self_attn.qkv_proj.weight": [slice(0, 32), slice(32, 48), slice(48, 64)],
            "self_attn.o_proj.weight": [...],
            "mlp.gate_up_proj.weight": [slice(0, 48), slice(48, 96)],
            "mlp.down_proj.weight": [...],
        },
    ),
    # The router, which is no linear module of torch's, is left to AdamW.
    "qwen3_moe": (
        EXPERTS,
        {
            **{f"self_attn.{name}_proj.weight": [...] for name in "qkvo"},
            # Of each expert gate and up.
            "mlp.experts.gate_up_proj": [
                (expert, slice(first, first + INNER)) for expert in range(4) for first in (0, INNER)
            ],
            "mlp.experts.down_proj": [0, 1, 2, 3],
        },
    ),
}
"""Fields of a config, and where the matrices of a layer's parameters lie in them."""


@pytest.mark.parametrize(
    ("family", "nesterov"), [*((family, True) for family in FAMILIES), ("qwen3", False)]
)
def test_steps_are_those_of_torchs_muon_and_adamw_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, nesterov: bool
) -> None:
    config, matrices = FAMILIES[family]
    folder = write_tiny_decoder(tmp_path, family, **config)
    # Torch's multiplies as bfloat16 on every machine.
    monkeypatch.setattr(muon, "device_of", lambda _: Device("cpu", multiplies_bfloat16=True))
    spec = MuonSpec(
        learning_rate=1e-2,
        warmup_steps=2,
        weight_decay=0.1,
        momentum=0.9,
        nesterov=nesterov,
        max_grad_norm=1e9,
    )
    trainer = Trainer.policy(ModelSpec(path=folder), spec)
    gradients = record_gradients(trainer)
    names = [name for name, _ in trainer.named_weights()]
    found = {
        name: next((places for suffix, places in matrices.items() if name.endswith(suffix)), None)
        for name in names
    }
    assert sum(places is not None for places in found.values()) == 2 * len(matrices)
    own = {
        (name, number): torch.nn.Parameter(weight[place].clone())
        for name, weight in trainer.named_weights()
        for number, place in enumerate(found[name] or [...])
    }
    vectors = [one for one in own.values() if one.dim() < 2]
    rest = [one for (name, _), one in own.items() if found[name] is None and one.dim() > 1]
    optimizers: list[Any] = [
        torch.optim.Muon(
            [one for (name, _), one in own.items() if found[name] is not None],
            weight_decay=0.1,
            momentum=0.9,
            nesterov=nesterov,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            [{"params": rest, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            fused=True,
        ),
    ]
    for step in range(3):
        forward_backward(trainer, token_batch(seed=step, vocab_size=VOCABULARY), SftLossSpec())
        trainer.optim_step()
        for (name, number), one in own.items():
            one.grad = gradients[step][name][(found[name] or [...])[number]].clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
            optimizer.step()
    for name, weight in trainer.named_weights():
        for number, place in enumerate(found[name] or [...]):
            assert torch.equal(weight[place], own[name, number].detach()), name
    kept = {state: set(trainer.optimizer_state(state)) for state in ("exp_avg", "exp_avg_sq")}
    assert kept["exp_avg"] == set(names)
    assert kept["exp_avg_sq"] == {name for name in names if found[name] is None}


@pytest.mark.parametrize(
    ("compute_dtype", "is_fast", "expected"),
    [
        ("bfloat16", True, torch.bfloat16),
        ("bfloat16", False, torch.float32),
        ("float32", True, torch.float32),
    ],
)
def test_products_are_of_the_models_type_where_the_machine_is_fast_in_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compute_dtype: Any,
    is_fast: bool,
    expected: torch.dtype,
) -> None:
    folder = write_tiny_llama(tmp_path)
    seen: set[torch.dtype] = set()

    def watched(matrix_RC: torch.Tensor, *, steps: int) -> torch.Tensor:
        seen.add(matrix_RC.dtype)
        return orthogonalised(matrix_RC, steps=steps)

    monkeypatch.setattr(muon, "orthogonalised", watched)
    monkeypatch.setattr(muon, "device_of", lambda _: Device("cpu", multiplies_bfloat16=is_fast))
    trainer = Trainer.policy(ModelSpec(path=folder, compute_dtype=compute_dtype), MuonSpec())
    forward_backward(trainer, token_batch(), SftLossSpec())
    trainer.optim_step()
    assert seen == {expected}


@pytest.mark.parametrize(
    ("family", "adapter"), [("qwen3", {"rank": 2}), ("gpt2", None)], ids=["adapter", "no linear"]
)
def test_a_model_without_matrices_of_layers_is_refused(
    tmp_path: Path, family: str, adapter: Any
) -> None:
    folder = write_tiny_decoder(tmp_path, family)
    model = ModelSpec.model_validate({"path": folder, "adapter": adapter})
    with pytest.raises(ValueError, match="has no matrix of a layer"):
        Trainer.policy(model, MuonSpec())


# --- many ranks ---------------------------------------------------------------------------


def train_in_rounds(at: RankContext, job: Job) -> Trained:
    """Trains with rounds as short as they may be."""
    before, matrix_owners.ROUND_BYTES = matrix_owners.ROUND_BYTES, 1
    try:
        return train(at, job)
    finally:
        matrix_owners.ROUND_BYTES = before


LAYOUTS = {
    "tp2": TrainLayout(tp=2),
    "pp2": TrainLayout(pp=2),
    "fsdp2": TrainLayout(dp=2, fsdp=2),
    "tp4 (2 kv heads)": TrainLayout(tp=4),
    "hsdp2x2": TrainLayout(dp=4, fsdp=2),
    "tp2-pp2-fsdp2": TrainLayout(tp=2, pp=2, dp=2, fsdp=2),
    # Its parts of 22 and 20 rows do not end where the stacked projections do.
    "fused, fsdp3": TrainLayout(dp=3, fsdp=3),
    "fused, tp2-fsdp2": TrainLayout(tp=2, dp=2, fsdp=2),
}
SLOW = ("fsdp2", "hsdp2x2", "fused, tp2-fsdp2")
"""Layouts of which others have each way of cutting."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Job]:
    """A tiny Llama, and a model with stacked projections."""
    optimizer = {"type": "muon", "weight_decay": 0.1}
    llama = policy_job(tmp_path_factory.mktemp("llama"), SftLossSpec())
    folder = write_tiny_decoder(
        tmp_path_factory.mktemp("phi3"), "phi3", bos_token_id=1, eos_token_id=2
    )
    batch = token_batch(vocab_size=VOCABULARY)
    scored = Trainer.policy(
        ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec()
    ).compute_logprobs(batch, temperature=1.0)["logprobs"]
    fused = Job(folder, near_policy(batch, scored), SftLossSpec())
    return {
        is_fused: replace(job, optimizer=optimizer)
        for is_fused, job in ((False, llama), (True, fused))
    }


@pytest.fixture(scope="module")
def alone(rank_pool: RankPool, jobs: dict[bool, Job]) -> dict[bool, Trained]:
    """What one rank comes to."""
    return {
        is_fused: joined(rank_pool.run(train, 1, job), job.layout) for is_fused, job in jobs.items()
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LAYOUTS],
)
def test_three_steps_on_many_ranks_agree_with_one(
    rank_pool: RankPool, jobs: dict[bool, Job], alone: dict[bool, Trained], name: str
) -> None:
    layout, is_fused = LAYOUTS[name], name.startswith("fused")
    job = replace(jobs[is_fused], layout=layout)
    found = joined(rank_pool.run(train_in_rounds, layout.world_size, job), layout)
    # The tolerance of AdamW's steps: with products of float32 Muon's are no further apart.
    assert_agree(found, alone[is_fused])


def test_rounds_are_the_same_for_all_ranks_and_leave_each_about_as_much_work() -> None:
    sizes = {f"matrix {number}": 8 * (1 + number % 3) for number in range(10)}
    rounds = matrix_owners.rounds_of(sizes, num_ranks=4, item_bytes=2 * matrix_owners.ROUND_BYTES)
    assert [name for names in rounds for name in names] == list(sizes)
    assert all(sum(sizes[name] for name in names) <= 4 * 24 for names in rounds)
    assert len(rounds) == 2
    loads = [0] * 4
    for names in rounds:
        owners = matrix_owners.owners_of({name: sizes[name] for name in names}, loads)
        assert owners.keys() == set(names)
    assert sum(loads) == sum(sizes.values())
    assert max(loads) - min(loads) <= 24
