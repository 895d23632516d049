"""Experts computed in groups, and shared out over ranks, against a loop over experts."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.family_cases import CASES, case_config
from support.parallel_training import (
    WHOLE_STEPS,
    Job,
    Tensors,
    assert_agree,
    distance,
    joined,
    near_policy,
    train,
)
from support.rank_processes import RankContext, RankPool
from support.slow_cases import mostly_slow
from support.tiny_families import write_tiny_decoder
from support.token_batches import token_batch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.ranks import HybridLayout, LayoutError, TrainLayout
from rolemesh.engine.layout.slices import check_layout
from rolemesh.engine.models.layers.experts import (
    Dealt,
    fits_grouped_kernel,
    group_experts,
    grouped_linear,
)
from rolemesh.engine.models.layers.rounding import round_weights, rounded_product
from rolemesh.engine.parallel.experts.exchange import computed_by_owners
from rolemesh.engine.parallel.experts.modules import experts_of
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec, RolloutRoleSpec
from rolemesh.engine.train.trainer import Trainer

FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "glm4_moe")
DOUBLE_TOLERANCE = 1e-12
"""Of gradients in float64, relative to their norm: sums in another order. Routers and norms of
transformers compute in float32 within, alike on both sides but for rows that lie elsewhere."""
IN_FLOAT32_WITHIN = 1e-6
"""The same, of what float32 parts of transformers' model pass on."""
FLOAT_TOLERANCE = 2e-6
"""Of gradients in float32: products and sums in another order. Up to 1.5e-6 of experts, and 1.3e-6
of all together, in 30 layouts and families; norms of queries, whose gradient is small beside what
it is summed of, are up to 3.9e-6 off."""
VOCABULARY = 100
EIGHT = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}


# --- one rank -------------------------------------------------------------------------------


def _model(family: str, **config: Any) -> PreTrainedModel:
    """A tiny model in float64, with routers whose choices differ between tokens."""
    given = {**case_config(family), "hidden_size": 32, "intermediate_size": 48, **config}
    given = {"vocab_size": VOCABULARY, "num_attention_heads": 4, "num_key_value_heads": 2, **given}
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{"head_dim": 8, "pad_token_id": 0, **given}),
        dtype=torch.float64,
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
    return made.eval()


def _loss(model: PreTrainedModel, rows: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        logprobs = model(row[None]).logits[0, :-1].log_softmax(-1)
        total = total - logprobs.gather(1, row[1:, None]).sum()
    return total


def _rows(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


def _gradients(model: PreTrainedModel, rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    _loss(model, rows).backward()
    return {
        name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None
    }


def _distances(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {
        name: float((found[name] - one).norm() / one.norm().clamp_min(1e-30))
        for name, one in expected.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(11, 5), (2,)], ids=["many tokens", "one token"])
def test_groups_compute_what_a_loop_over_experts_does(
    family: str, lengths: tuple[int, ...]
) -> None:
    """Of one token most experts get no row: their gradients are zeros."""
    model = _model(family)
    looped = copy.deepcopy(model)
    looped.set_experts_implementation("eager")
    group_experts(model)
    rows = _rows(*lengths)
    torch.testing.assert_close(_loss(model, rows), _loss(looped, rows), rtol=1e-14, atol=0)
    apart = _distances(_gradients(model, rows), _gradients(looped, rows))
    assert max(apart.values()) < DOUBLE_TOLERANCE, apart


@pytest.mark.parametrize(("at_a_time", "num_groups"), [(1, 4), (2 * 5 * 4, 3), (10**6, 2)])
def test_a_gradient_is_asked_of_what_is_trained_alone(
    monkeypatch: pytest.MonkeyPatch, at_a_time: int, num_groups: int
) -> None:
    """However many neighbouring experts are taken together; one between them has no rows."""
    from rolemesh.engine.models.layers import experts

    monkeypatch.setattr(experts, "NUMBERS_AT_A_TIME", at_a_time)
    x_NC = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    weight_EOC = torch.randn(5, 5, 4, dtype=torch.float64)
    counts = [4, 0, 2, 1, 3]
    assert len(experts._groups(counts, weight_EOC)) == num_groups
    made_NO = grouped_linear(x_NC, weight_EOC, counts)
    each = zip(x_NC.split(counts), weight_EOC, strict=True)
    torch.testing.assert_close(made_NO, torch.cat([x_MC @ one_OC.t() for x_MC, one_OC in each]))
    made_NO.sum().backward()
    assert weight_EOC.grad is None
    assert torch.autograd.gradcheck(
        lambda x, w: grouped_linear(x, w, counts), (x_NC, weight_EOC.requires_grad_())
    )


@pytest.mark.parametrize("is_fast", [True, False], ids=["bfloat16 products", "emulated ones"])
def test_numbers_of_bfloat16_are_multiplied_as_the_machine_is_fast(
    monkeypatch: pytest.MonkeyPatch, is_fast: bool
) -> None:
    from rolemesh.engine.models.layers import experts

    machine = replace(experts.device_of("cpu"), multiplies_bfloat16=is_fast)
    monkeypatch.setattr(experts, "device_of", lambda kind: machine)
    x_NC, weight_EOC = torch.randn(7, 16).bfloat16(), torch.randn(2, 5, 16).bfloat16()
    made_NO = grouped_linear(x_NC, weight_EOC, [3, 4])
    assert made_NO.dtype == torch.bfloat16
    expected = torch.cat(
        [x_NC[:3].float() @ weight_EOC[0].float().t(), x_NC[3:].float() @ weight_EOC[1].float().t()]
    )
    # A step of bfloat16.
    torch.testing.assert_close(made_NO.float(), expected, rtol=2**-7, atol=1e-2)


class _Sizes(TorchDispatchMode):
    """Sizes of the left factors of products."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.out:
            self.made.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dealt", ["reads", "sums", ""])
def test_products_of_bfloat16_have_few_sizes_and_no_part_of_other_experts(
    monkeypatch: pytest.MonkeyPatch, dealt: str
) -> None:
    from rolemesh.engine.models.layers import experts

    machine = replace(experts.device_of("cpu"), multiplies_bfloat16=True)
    monkeypatch.setattr(experts, "device_of", lambda kind: machine)
    torch.manual_seed(0)
    chosen_SK = torch.multinomial(torch.tensor([1.0, 0.0, 9.0, 3.0, 0.2]).expand(90, -1), 2)
    counts = torch.bincount(chosen_SK.flatten(), minlength=5).tolist()
    how = {dealt: Dealt.by_expert(chosen_SK)} if dealt else {}
    x = torch.randn(90 if dealt == "reads" else 180, 24).bfloat16()
    weight_EOC = torch.randn(5, 8, 24).bfloat16()
    upstream = torch.randn(90 if dealt == "sums" else 180, 8).bfloat16()
    found, uneven = [], []
    for rows_at_a_time in (16, 1):
        monkeypatch.setattr(experts, "ROWS_AT_A_TIME", rows_at_a_time)
        leaves = [one.clone().requires_grad_() for one in (x, weight_EOC)]
        with _Sizes() as sizes:
            made = grouped_linear(*leaves, counts, **how)
            made.backward(upstream)
        found.append([made.detach(), *(leaf.grad for leaf in leaves)])
        # Gradients of weights are [O, rows] @ [rows, C]; only copies are widened there.
        rows = {size for shape in sizes.made if dealt or shape[0] != 8 for size in shape} - {8, 24}
        uneven.append(sum(size % 16 > 0 for size in rows))
    # Those of the last experts end where all rows do.
    assert uneven[0] <= 2 < uneven[1]
    for widened, own in zip(*found, strict=True):
        assert widened is not None
        # Sums of float32 in another order, and then a step of bfloat16.
        torch.testing.assert_close(widened, own, rtol=2**-7, atol=1e-2)


def test_gradients_of_rounded_weights_are_narrow_where_those_of_a_linear_layer_are() -> None:
    model = _model("qwen3_moe").float()
    group_experts(model)
    round_weights(model.base_model, narrow_gradients=True)
    experts: Any = experts_of(model)[0]
    wide = copy.deepcopy(experts.gate_up_proj.detach())
    x_NC = torch.randn(10, wide.shape[2], requires_grad=True)
    weight_EOC = wide.clone().requires_grad_()
    counts = [4, 0, 3, 1, 2]
    made_NO = grouped_linear(x_NC, weight_EOC, counts, experts.arithmetic)
    upstream = torch.randn_like(made_NO)
    made_NO.backward(upstream)
    for expert, (rows, grad_rows) in enumerate(
        zip(x_NC.split(counts), upstream.split(counts), strict=True)
    ):
        own = wide[expert].clone().requires_grad_()
        x_MC = rows.detach().clone().requires_grad_()
        product = rounded_product(x_MC, own)
        product.backward(grad_rows)
        first = sum(counts[:expert])
        assert x_NC.grad is not None
        assert weight_EOC.grad is not None
        assert own.grad is not None
        torch.testing.assert_close(weight_EOC.grad[expert], own.grad, rtol=2**-7, atol=1e-2)
        torch.testing.assert_close(
            x_NC.grad[first : first + len(rows)], x_MC.grad, rtol=2**-7, atol=1e-2
        )
        assert torch.equal(weight_EOC.grad, weight_EOC.grad.bfloat16().float())


# --- experts shared out over ranks ----------------------------------------------------------


def exchange_rows(at: RankContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows times the number of their expert and 1, by the rank that has it; and their gradients."""
    layout = TrainLayout(dp=at.world_size, ep=at.world_size)
    # Rank 0 has no row, and nobody asks for the last rank's experts.
    counts = [[0, 0, 0, 0, 0, 0], [3, 0, 1, 2, 0, 0], [0, 4, 0, 1, 0, 0]][at.rank]
    with at.connect(HybridLayout(layout)) as mesh:
        first = 2 * mesh.experts.index

        def compute(rows_MD: torch.Tensor, own: Any) -> torch.Tensor:
            factor = torch.arange(first + 1, first + 3).repeat_interleave(torch.tensor(own))
            return rows_MD * factor[:, None]

        x_ND = torch.arange(sum(counts) * 2, dtype=torch.bfloat16).view(-1, 2).requires_grad_()
        made_ND = computed_by_owners(x_ND, counts, mesh.experts, compute)
        expected = torch.arange(1, 7).repeat_interleave(torch.tensor(counts))[:, None]
        assert torch.equal(made_ND, x_ND * expected)
        made_ND.sum().backward()
        assert x_ND.grad is not None
        return x_ND.grad, expected.expand(-1, 2).to(torch.bfloat16)


def test_rows_go_to_the_owners_of_their_experts_and_back(rank_pool: RankPool) -> None:
    for found, expected in rank_pool.run(exchange_rows, 3):
        assert torch.equal(found, expected)


@dataclass
class Apart:
    """How far gradients of ranks are from those of one."""

    of_experts: float
    of_others: float


def gradients_of_shared_experts(at: RankContext, family: str) -> Apart:
    """Those of a model in float64 whose experts ranks share out, each with rows of its own."""
    size = at.world_size
    rows = _rows(9, 3, 6, 2, 12, 5, 2)
    whole = _model(family, **EIGHT)
    group_experts(whole)
    expected = _gradients(whole, rows)
    with at.connect(HybridLayout(TrainLayout(dp=size, ep=size))) as mesh:
        model = _model(family, **EIGHT)
        number = 8 // size
        own = slice(mesh.experts.index * number, (mesh.experts.index + 1) * number)
        for module in experts_of(model):
            patched: Any = module
            for name in ("gate_up_proj", "down_proj"):
                stack = getattr(patched, name).detach()[own].clone()
                setattr(patched, name, torch.nn.Parameter(stack))
        group_experts(model, mesh.experts)
        # As many passes on every rank: a row without a target has a loss of 0.
        mine = [rows[i] if i < len(rows) else rows[0][:1] for i in range(at.rank, 8, size)]
        found = _gradients(model, mine)
        for name, gradient in found.items():
            if ".experts." not in name:
                torch.distributed.all_reduce(gradient, group=mesh.dp.process_group)
        stacks = {name: one[own] if ".experts." in name else one for name, one in expected.items()}
        apart = _distances(found, stacks)
        return Apart(
            of_experts=max(value for name, value in apart.items() if ".experts." in name),
            of_others=max(value for name, value in apart.items() if ".experts." not in name),
        )


@pytest.mark.parametrize(("family", "size"), [("qwen3_moe", 2), ("glm4_moe", 4)])
def test_gradients_of_shared_experts_are_those_of_one_rank(
    rank_pool: RankPool, family: str, size: int
) -> None:
    for apart in rank_pool.run(gradients_of_shared_experts, size, family):
        assert apart.of_experts < DOUBLE_TOLERANCE, apart
        assert apart.of_others < DOUBLE_TOLERANCE, apart


LAYOUTS: dict[str, tuple[TrainLayout, dict[str, Any]]] = {
    "ep2": (TrainLayout(dp=2, ep=2), {}),
    "ep2 fsdp2": (TrainLayout(dp=2, ep=2, fsdp=2), {}),
    "ep2 fsdp4": (TrainLayout(dp=4, ep=2, fsdp=4), {}),
    "ep4 fsdp2": (TrainLayout(dp=4, ep=4, fsdp=2), {}),
    "ep2 of four": (TrainLayout(dp=4, ep=2), {}),
    "ep2 tp2": (TrainLayout(dp=2, tp=2, ep=2), {}),
    "ep2 tokens shared": (TrainLayout(dp=2, tp=2, ep=2), {"sequence_parallel": True}),
    "all ways": (TrainLayout(tp=2, pp=2, dp=2, fsdp=2, ep=2), {}),
    "cp2 ep4 fsdp2": (TrainLayout(dp=4, ep=4, fsdp=2, cp=2), {}),
    "cp2 tp2, tokens shared": (TrainLayout(dp=2, tp=2, cp=2), {"sequence_parallel": True}),
    "recomputed": (TrainLayout(dp=2, ep=2, fsdp=2), {"recompute": "full"}),
    "adapter": (TrainLayout(dp=2, ep=2, fsdp=2), {"adapter": {"rank": 2}}),
}
PAIRS = [(family, name) for family in ("qwen3_moe", "glm4_moe", "mixtral") for name in LAYOUTS]
QUICK = [
    *(("qwen3_moe", "ep2 fsdp4"), ("glm4_moe", "all ways"), ("mixtral", "ep4 fsdp2")),
    ("qwen3_moe", "cp2 ep4 fsdp2"),
]
"""Those that `make test` makes: experts cut further, every axis with buffers, whole experts beside
layers that are cut, and experts of ranks that cut rows, and of others."""


def _job(folder: Path, **model: Any) -> Job:
    batch = token_batch(vocab_size=VOCABULARY)
    trainer = Trainer.policy(ModelSpec(path=folder, compute_dtype="float32"), OptimizerSpec())
    scored = trainer.compute_logprobs(batch, temperature=1.0)["logprobs"]
    loss = PpoPolicyLossSpec(kl_in_loss=0.1)
    return Job(folder, near_policy(batch, scored), loss, model=WHOLE_STEPS | model)


@pytest.mark.parametrize(
    ("family", "name"),
    mostly_slow([number for number, pair in enumerate(PAIRS) if pair in QUICK], PAIRS),
)
def test_ranks_that_share_experts_train_as_one(
    rank_pool: RankPool, tmp_path: Path, family: str, name: str
) -> None:
    layout, fields = LAYOUTS[name]
    config = {**case_config(family), **{key: 8 for key in EIGHT if key in CASES[family][1]}}
    folder = write_tiny_decoder(tmp_path, family, vocab_size=VOCABULARY, **config)
    shared = {key: value for key, value in fields.items() if key == "adapter"}
    job = _job(folder, **shared)
    alone = joined(rank_pool.run(train, 1, job), TrainLayout())
    spread = replace(job, layout=layout, model=job.model | fields)
    found = joined(rank_pool.run(train, layout.world_size, spread), layout)
    assert_agree(found, alone)
    _assert_gradients_are_within_float32(found.gradients[0], alone.gradients[0])


def _assert_gradients_are_within_float32(found: Tensors, expected: Tensors) -> None:
    """Closer than `assert_agree` asks of each parameter: experts, and the gradient as a whole."""
    apart = [(found[name].double() - one.double()).norm() for name, one in expected.items()]
    norms = [one.double().norm() for one in expected.values()]
    assert torch.stack(apart).norm() < FLOAT_TOLERANCE * torch.stack(norms).norm()
    for name, gradient in expected.items():
        if ".experts." in name:
            assert distance(found[name], gradient) < FLOAT_TOLERANCE, name


@pytest.mark.parametrize("rows", [4, 8, 12, 16])
@pytest.mark.parametrize("columns", [6, 16])
def test_torch_says_which_sizes_its_grouped_product_takes(rows: int, columns: int) -> None:
    # Its check is the same for every device.
    x_NC = torch.randn(32, columns, dtype=torch.bfloat16, requires_grad=True)
    weight_EOC = torch.randn(2, rows, columns, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([16, 32], dtype=torch.int32)
    try:
        made_NO = functional.grouped_mm(x_NC, weight_EOC.transpose(1, 2), offs=ends)
        made_NO.backward(torch.ones_like(made_NO))
    except (RuntimeError, ValueError) as error:
        assert "multiple of 16 bytes" in str(error)  # noqa: PT017
        takes = False
    else:
        takes = True
    assert takes or not fits_grouped_kernel(weight_EOC)
    if (rows, columns) in {(8, 16), (16, 16)}:
        assert takes
        assert fits_grouped_kernel(weight_EOC)


# --- layouts --------------------------------------------------------------------------------


def test_groups_of_experts_lie_within_the_data_axis() -> None:
    layout = TrainLayout(tp=2, dp=4, fsdp=4, ep=2)
    assert layout.expert_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.expert_fsdp_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.expert_replicate_groups() == tuple((rank,) for rank in range(8))
    replicas = TrainLayout(dp=4, ep=2)
    assert replicas.expert_fsdp_groups() == ((0,), (1,), (2,), (3,))
    assert replicas.expert_replicate_groups() == ((0, 2), (1, 3))
    assert layout.described() == "1-2-4 fsdp 4 ep 2"
    assert "ep=2" in layout.flag()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp": 4, "ep": 3}, r"ep 3 does not divide dp 4: give one of \[1, 2, 4\]"),
        ({"dp": 12, "fsdp": 6, "ep": 4}, "ep 4 neither divides fsdp 6 nor is a multiple"),
        ({"ep": 0}, "ep is 0: give at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        TrainLayout(**sizes)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen3_moe", "ep 2 does not divide the 5 experts of the qwen3_moe model's layers"),
        ("qwen3", "ep is 2, but the qwen3 model has no experts: give 1"),
    ],
)
def test_a_model_whose_experts_cannot_be_shared_out_is_refused(family: str, words: str) -> None:
    config = AutoConfig.for_model(family, **case_config(family)).to_dict()
    with pytest.raises(LayoutError, match=words):
        check_layout(DecoderShape.from_config(config), TrainLayout(dp=2, ep=2))


def test_a_sampler_holds_all_experts() -> None:
    model = {"path": "model"}
    rollout = {
        "model": model,
        "rollout": {"type": "hf"},
        "data": {"type": "jsonl", "path": "rows.jsonl"},
        "layout": {"dp": 2, "ep": 2},
    }
    with pytest.raises(ValueError, match=r"layout\.ep is 2: .*; leave ep out"):
        RolloutRoleSpec.model_validate(rollout)
