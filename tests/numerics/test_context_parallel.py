"""Packed rows that ranks cut among them, against one rank that has whole ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from support.rank_processes import RankContext, RankPool
from support.tiny_families import write_tiny_decoder
from support.tiny_models import write_tiny_classifier
from support.token_batches import token_batch, with_shared_prompts
from torch.nn import functional
from transformers import AutoConfig

from rolemesh.engine.experience import Experience
from rolemesh.engine.fit.alone import alone
from rolemesh.engine.layout.families import DecoderShape, UnsupportedFamilyError
from rolemesh.engine.layout.ranks import HybridLayout, LayoutError, TrainLayout
from rolemesh.engine.layout.slices import check_layout
from rolemesh.engine.models import decoder
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.classifier import Classifier
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring import compute_logprobs
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoreHead, ScoringModel
from rolemesh.engine.packing.packed_rows import PackedRows, pack_rows
from rolemesh.engine.packing.pass_cost import APART, PassCost
from rolemesh.engine.parallel.context_parallel import to_heads, to_tokens
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import ModelSpec, RolloutRoleSpec

DOUBLE_TOLERANCE = 1e-12
"""Of what is computed in float64, relative to its norm: sums in another order."""
FLOAT_TOLERANCE = 2e-6
"""The same in float32."""
VOCABULARY = 100
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
"""Four ranks are more than there are key-value heads."""
EVERYTHING_SHARED = PassCost(
    pairs_per_token=float("inf"), pairs_per_call=100.0, margin=float("inf")
)


# --- the exchange ---------------------------------------------------------------------------


def exchange(at: RankContext, num_tokens: int, dtype: torch.dtype) -> None:
    """Heads for tokens and back, of queries and of fewer keys; and what their gradients are."""
    size = at.world_size
    with at.connect(HybridLayout(TrainLayout(dp=size, cp=size))) as mesh:
        each = -(-num_tokens // size)
        generator = torch.Generator().manual_seed(2)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randint(-8, 8, shape, generator=generator).to(dtype)

        # Small integers: sums of them are exact in any type.
        queries, keys = drawn(1, 8, num_tokens, 4), drawn(1, 2, num_tokens, 6)
        own = slice(each * mesh.cp.index, each * (mesh.cp.index + 1))

        def cut(whole: torch.Tensor) -> torch.Tensor:
            filled = functional.pad(whole, (0, 0, 0, each * size - num_tokens))
            # As transformers has them: tokens in memory before heads.
            return filled[:, :, own].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()

        own_queries, own_keys = cut(queries), cut(keys)
        got_queries, got_keys = to_heads((own_queries, own_keys), mesh.cp, num_tokens)
        heads = slice(8 // size * mesh.cp.index, 8 // size * (mesh.cp.index + 1))
        assert torch.equal(got_queries, queries[:, heads])
        key_heads = keys.repeat_interleave(max(1, size // 2), 1).chunk(size, 1)[mesh.cp.index]
        assert torch.equal(got_keys, key_heads)
        back = to_tokens(got_queries.transpose(1, 2), mesh.cp)
        assert torch.equal(back.transpose(1, 2), own_queries)

        weights = drawn(*back.shape), drawn(1, 2, num_tokens, 6)
        (back * weights[0]).sum().backward(retain_graph=True)
        # What fills up comes back as zeros, and has no gradient.
        real = min(each, max(0, num_tokens - own.start))
        expected = weights[0].transpose(1, 2).clone()
        expected[:, :, real:] = 0
        assert own_queries.grad is not None
        assert torch.equal(own_queries.grad, expected)
        # Each rank that has a head's copy gives it a gradient.
        used = weights[1].repeat_interleave(max(1, size // 2), 1).chunk(size, 1)[mesh.cp.index]
        (got_keys * used).sum().backward()
        assert own_keys.grad is not None
        assert torch.equal(own_keys.grad, cut(max(1, size // 2) * weights[1]).detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "num_tokens"), [(2, 7), (4, 12), (4, 5), (4, 1)])
def test_heads_are_handed_out_for_tokens_and_back(
    rank_pool: RankPool, size: int, num_tokens: int, dtype: torch.dtype
) -> None:
    rank_pool.run(exchange, size, num_tokens, dtype)


# --- a pass ---------------------------------------------------------------------------------

Kind = Literal["policy", "choices", "critic", "reward"]


@dataclass
class Passed:
    """What a pass gave, and the gradients of a sum with random weights over all ranks."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


def one_pass(at: RankContext, folder: Path, kind: Kind, dtype: torch.dtype, shares: bool) -> Passed:
    """A pass over rows that all ranks cut among them."""
    size = at.world_size
    with at.connect(HybridLayout(TrainLayout(dp=size, cp=size))) as mesh:
        model = _model(folder, kind, mesh)
        model.lm.to(dtype)
        if dtype == torch.float64:
            _norm_in_own_type(model)
        batch = _rows()
        rows = pack_rows(batch, "cpu", EVERYTHING_SHARED if shares else APART, mesh.cp)
        assert rows.tokens_1S.shape[1] % 4, "nothing has to be filled up"
        outputs = _outputs(model, rows, kind)
        generator = torch.Generator().manual_seed(3)
        sum(
            (one * torch.randn(one.shape, dtype=dtype, generator=generator)).sum()
            for one in outputs
        ).backward()  # type: ignore[union-attr]
        gradients = {name: one.grad.clone() for name, one in model.named_weights()}
        if size > 1:
            for gradient in gradients.values():
                dist.all_reduce(gradient, group=mesh.dp.process_group)
        return Passed([one.detach() for one in outputs], gradients)


def _model(folder: Path, kind: Kind, mesh: RankMesh) -> CausalLm | ScoringModel:
    spec = ModelSpec(path=folder, compute_dtype="float32")
    if kind in ("policy", "choices"):
        return CausalLm(spec, mesh=mesh)
    head = VALUE_HEAD if kind == "critic" else ScoreHead(per="row", origin="new")
    model = ScoringModel(spec, head, mesh=mesh)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model


def _norm_in_own_type(model: CausalLm | ScoringModel) -> None:
    """Norms of transformers compute in float32, whatever they are given."""

    def norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
        squares = hidden.square().mean(-1, keepdim=True)
        normed: torch.Tensor = (
            module.weight * hidden * torch.rsqrt(squares + module.variance_epsilon)
        )
        return normed

    for module in model.lm.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = norm.__get__(module)


def _rows() -> Experience:
    """Groups of a prompt, ragged; one completion is empty and one prompt has one token."""
    prompts, completions = (9, 9, 9, 1, 1, 1, 5, 5), (4, 0, 7, 2, 12, 3, 1, 6)
    return with_shared_prompts(
        token_batch(
            prompt_lengths=prompts,
            completion_lengths=completions,
            vocab_size=VOCABULARY,
        ),
        3,
    )


def _outputs(model: CausalLm | ScoringModel, rows: PackedRows, kind: Kind) -> list[torch.Tensor]:
    hidden_1LD = model.stage_forward(rows, None)
    if isinstance(model, ScoringModel):
        return [model.finish(hidden_1LD, rows)]
    generator = torch.Generator().manual_seed(5)
    ids_NK = torch.randint(0, VOCABULARY, (35, 3), generator=generator)
    choices = {"choices_NK": ids_NK} if kind == "choices" else {}
    scores = model.finish(hidden_1LD, rows, temperature=0.8, with_entropy=True, **choices)
    return [
        one for one in (scores.logprobs_N, scores.entropy_N, scores.choices_NK) if one is not None
    ]


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_decoder(
        tmp_path_factory.mktemp("qwen3"), "qwen3", tie_word_embeddings=True, **SIZES
    )


@pytest.mark.parametrize(
    ("kind", "dtype", "shares"),
    [
        *((kind, torch.float64, True) for kind in ("policy", "choices", "critic", "reward")),
        # Rows apart, and the type of training.
        *(("policy", torch.float64, False), ("policy", torch.float32, True)),
        ("reward", torch.float32, False),
    ],
    ids=str,
)
def test_ranks_that_cut_a_row_compute_what_one_does(
    rank_pool: RankPool, folder: Path, kind: Kind, dtype: torch.dtype, shares: bool
) -> None:
    tolerance = DOUBLE_TOLERANCE if dtype == torch.float64 else FLOAT_TOLERANCE
    (whole,) = rank_pool.run(one_pass, 1, folder, kind, dtype, shares)
    for size in (2, 4) if kind == "policy" else (4,):
        for found in rank_pool.run(one_pass, size, folder, kind, dtype, shares):
            for one, expected in zip(found.outputs, whole.outputs, strict=True):
                assert _distance(one, expected) < tolerance
            assert found.gradients.keys() == whole.gradients.keys()
            for name, gradient in whole.gradients.items():
                assert float(gradient.norm()) > 0, name
                assert _distance(found.gradients[name], gradient) < tolerance, name


# --- scoring --------------------------------------------------------------------------------


def scored(at: RankContext, folder: Path, layout: TrainLayout) -> list[torch.Tensor]:
    """Log-probs of tokens, and the likeliest ones."""
    with at.connect(HybridLayout(layout)) as mesh:
        batch = _rows()
        policy = RankModel(CausalLm(ModelSpec(path=folder, compute_dtype="float32"), mesh=mesh))
        # What ranks of the other replica take part in has no rows.
        own = batch.select(torch.arange(8) if mesh.parts.is_first else torch.arange(0))
        found = compute_logprobs(policy, own, temperature=1.0, top_k=4)
        return [found[name].values for name in ("logprobs", "top_ids", "top")]


def test_likeliest_tokens_are_those_of_one_rank(rank_pool: RankPool, folder: Path) -> None:
    layout = TrainLayout(dp=4, cp=2, fsdp=4)
    (expected,) = rank_pool.run(scored, 1, folder, TrainLayout())
    for rank, found in enumerate(rank_pool.run(scored, 4, folder, layout)):
        if layout.coordinates(rank).dp >= layout.cp:
            assert not any(len(one) for one in found)
            continue
        assert torch.equal(found[1], expected[1])
        for one, other in ((found[0], expected[0]), (found[2], expected[2])):
            assert _distance(one, other) < FLOAT_TOLERANCE


def classified(at: RankContext, folder: Path, layout: TrainLayout) -> torch.Tensor:
    with at.connect(HybridLayout(layout)) as mesh:
        rows = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14], [5, 6]]
        return Classifier(ModelSpec(path=folder), label=1, mesh=mesh).score(rows)


def test_a_classifier_scores_rows_that_are_cut(rank_pool: RankPool, tmp_path: Path) -> None:
    folder = write_tiny_classifier(tmp_path, seed=4)
    (expected,) = rank_pool.run(classified, 1, folder, TrainLayout())
    for found in rank_pool.run(classified, 4, folder, TrainLayout(dp=4, cp=4)):
        assert _distance(found, expected) < FLOAT_TOLERANCE


# --- layouts --------------------------------------------------------------------------------


def test_ranks_that_cut_rows_are_neighbours_of_the_data_axis() -> None:
    layout = TrainLayout(tp=2, dp=4, fsdp=4, cp=2)
    assert layout.cp_groups() == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.part_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.model_groups() == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.replicate_groups() == tuple((rank,) for rank in range(8))
    assert layout.num_parts == 2
    assert layout.described() == "1-2-4 fsdp 4 cp 2"
    assert "cp=2" in layout.flag()
    assert "cp" not in TrainLayout(dp=4).flag()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"dp": 4, "cp": 3}, r"cp 3 does not divide dp 4: give one of \[1, 2, 4\]"),
        ({"cp": 0}, "cp is 0: give at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        TrainLayout(**sizes)


@pytest.mark.parametrize(
    ("heads", "layout", "words"),
    [
        (
            (8, 2),
            TrainLayout(dp=16, cp=16),
            "cp 16 does not divide the 8 query heads of the qwen3 model, which its ranks share out "
            r"around attention: give one of \[1, 2, 4, 8\]",
        ),
        (
            (8, 2),
            TrainLayout(tp=4, dp=4, cp=4),
            "cp 4 does not divide the 2 query heads of a slice of tp 4 of the qwen3 model",
        ),
        (
            (12, 6),
            TrainLayout(dp=4, cp=4),
            "cp 4 neither divides the 6 key-value heads of the qwen3 model nor is a multiple",
        ),
    ],
    ids=["more than heads", "more than those of a slice", "between key-value heads"],
)
def test_heads_that_ranks_cannot_share_out_are_refused(
    heads: tuple[int, int], layout: TrainLayout, words: str
) -> None:
    config = AutoConfig.for_model(
        "qwen3", num_attention_heads=heads[0], num_key_value_heads=heads[1]
    )
    shape = DecoderShape.from_config(config.to_dict())
    check_layout(shape, TrainLayout(dp=2, cp=2))
    with pytest.raises(LayoutError, match=words):
        check_layout(shape, layout)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_a_pass_are_refused(tmp_path: Path, kind: str) -> None:
    factors = {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4} if kind == "longrope" else {}
    rotations = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **factors}
    rotations["original_max_position_embeddings"] = 32
    folder = write_tiny_decoder(tmp_path, "qwen3", rope_parameters=rotations, **SIZES)
    CausalLm(ModelSpec(path=folder))
    with (
        alone(HybridLayout(TrainLayout(dp=2, cp=2)), 0) as mesh,
        pytest.raises(UnsupportedFamilyError, match=f"qwen3 model has rope_type '{kind}', which"),
    ):
        CausalLm(ModelSpec(path=folder), mesh=mesh)


def test_a_model_that_takes_no_packed_rows_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of the families that are spread over ranks today is one."""
    monkeypatch.setattr(decoder, "takes_packed_rows", lambda lm: False)
    with (
        alone(HybridLayout(TrainLayout(dp=2, cp=2)), 0) as mesh,
        pytest.raises(UnsupportedFamilyError, match="cp is 2, but the qwen3 model takes no packed"),
    ):
        CausalLm(ModelSpec(path=folder), mesh=mesh)


def test_a_sampler_has_whole_rows() -> None:
    rollout = {
        "model": {"path": "model"},
        "rollout": {"type": "hf"},
        "data": {"type": "jsonl", "path": "rows.jsonl"},
        "layout": {"dp": 2, "cp": 2},
    }
    with pytest.raises(ValueError, match=r"layout\.cp is 2: .*; leave cp out"):
        RolloutRoleSpec.model_validate(rollout)
