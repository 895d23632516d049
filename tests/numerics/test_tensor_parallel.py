"""Tensor slices of decoders against the whole model on one rank, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_processes import RankContext, RankFailedError, RankPool
from support.rollout_checks import load_trainer_model, rounded_copy
from support.slices import slice_box
from support.slow_cases import mostly_slow
from support.tiny_families import write_tiny_decoder
from support.tiny_models import write_tiny_classifier
from support.token_batches import COMPLETION_LENGTHS, PROMPT_LENGTHS, score, token_batch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.classifier import Classifier
from rolemesh.engine.models.decoder import Decoder
from rolemesh.engine.models.folder import read_config
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoreHead, ScoringModel
from rolemesh.engine.packing.packed_rows import PackedRows, pack_rows, whole_rows
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.parallel.tensor_parallel import sum_partial_gradients
from rolemesh.engine.specs import ModelSpec

TOLERANCE = 2e-5
"""float32 through two layers, with sums in another order because they are cut."""
GRADIENT_TOLERANCE = 2e-5
"""Of a gradient's largest entry: the same sums, backwards."""

BFLOAT16_GRADIENT_TOLERANCE = 0.02
"""Relative, over all weights: backward products round their factors and results, by 1/256 each."""

ROW_HEAD = ScoreHead(per="row")

TOKEN_ROWS = [[5, 6, 7, 8, 99], [9], [10, 11, 0], [63, 64, 65, 66, 67, 98]]


@dataclass(frozen=True)
class Pass:
    """What one rank made of a batch."""

    outputs: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def _spec(path: Path, **options: object) -> ModelSpec:
    return ModelSpec.model_validate({"path": path, "compute_dtype": "float32", **options})


def _rows(spec: ModelSpec, rows: slice = slice(None)) -> PackedRows:
    lengths = {
        "prompt_lengths": PROMPT_LENGTHS[rows],
        "completion_lengths": COMPLETION_LENGTHS[rows],
    }
    return pack_rows(token_batch(vocab_size=read_config(spec).vocab_size, **lengths), "cpu")


def run_pass(spec: ModelSpec, head: str, mesh: RankMesh | None, rows: slice = slice(None)) -> Pass:
    """Loads a model, scores a batch, and sends a gradient back that differs for each token."""
    model: Decoder
    outputs: dict[str, torch.Tensor]
    if head == "lm_head":
        model = lm = CausalLm(spec, mesh=mesh)
        logprobs, entropy = score(lm, _rows(spec, rows), temperature=0.8, with_entropy=True)
        assert entropy is not None
        outputs = {"logprobs": logprobs, "entropy": entropy}
    elif head == "values":
        model = critic = ScoringModel(spec, VALUE_HEAD, mesh=mesh)
        outputs = {"values": critic(_rows(spec, rows))}
    else:
        model = classifier = ScoringModel(spec, ROW_HEAD, mesh=mesh)
        outputs = {"logits": classifier(pack_rows(whole_rows(TOKEN_ROWS), "cpu"))}
    generator = torch.Generator().manual_seed(11)
    loss = sum(
        torch.randn(len(output), generator=generator).to(output) @ output
        for output in outputs.values()
    )
    assert isinstance(loss, torch.Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    if mesh is not None:
        sum_partial_gradients(model.named_weights(), model.partial_gradients(), mesh.tp)
    named = dict(model.named_weights())
    assert all(weight.grad is not None for weight in named.values())
    return Pass(
        {name: output.detach().clone() for name, output in outputs.items()},
        {name: weight.grad.clone() for name, weight in named.items() if weight.grad is not None},
        {name: weight.detach().clone() for name, weight in named.items()},
    )


def pass_of_rank(
    at: RankContext,
    spec: ModelSpec,
    head: str,
    layout: TrainLayout,
    rows: slice = slice(None),
) -> Pass:
    """`run_pass` on a rank of a mesh."""
    with at.connect(HybridLayout(layout)) as mesh:
        return run_pass(spec, head, mesh, rows)


def check_against_one_rank(
    whole: Pass,
    parts: list[Pass],
    spec: ModelSpec,
    head: str,
    tolerance: float = TOLERANCE,
    gradient_tolerance: float = GRADIENT_TOLERANCE,
) -> None:
    """Outputs equal on all ranks; each weight and gradient is the whole's box."""
    shape = (CausalLm(spec) if head == "lm_head" else _model(spec, head)).shape
    assert shape is not None
    for rank, part in enumerate(parts):
        for name, output in whole.outputs.items():
            torch.testing.assert_close(part.outputs[name], output, rtol=0, atol=tolerance)
        assert part.weights.keys() == whole.weights.keys()
        for name, weight in whole.weights.items():
            box = slice_box(shape, name, tp=rank, size=len(parts))
            cut = tuple(slice(start, stop) for start, stop in box)
            assert torch.equal(part.weights[name], weight[cut]), name
            wanted = whole.gradients[name]
            assert float(wanted.abs().max()) > 0, name
            torch.testing.assert_close(
                part.gradients[name],
                wanted[cut],
                rtol=0,
                atol=gradient_tolerance * float(wanted.abs().max()),
                msg=lambda text, name=name, rank=rank: f"{name} of rank {rank}: {text}",
            )


def _model(spec: ModelSpec, head: str) -> Decoder:
    if head == "values":
        return ScoringModel(spec, VALUE_HEAD)
    return ScoringModel(spec, ROW_HEAD)


CASES: dict[str, tuple[str, Mapping[str, object]]] = {
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-one-kv-head": ("qwen3", {"num_key_value_heads": 1}),
    "empty-vocabulary-slice": ("llama", {"vocab_size": 70, "tie_word_embeddings": True}),
}


NEEDED = ("llama-biases", "qwen3", "qwen3-one-kv-head", "empty-vocabulary-slice")
"""Cases that `make test` makes: with what slices sum once, what each has of a head, and parts that
are empty or the same. Test_families cuts the others."""


def _cases(quick_tp: int) -> Iterator[Any]:
    """Each case in two and in four slices."""
    for case in CASES:
        for tp in (2, 4):
            is_slow = case not in NEEDED or tp != quick_tp
            yield pytest.param(case, tp, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize(("case", "tp"), list(_cases(quick_tp=4)))
def test_slices_score_and_learn_as_the_whole_model(
    rank_pool: RankPool, tmp_path: Path, case: str, tp: int
) -> None:
    family, config = CASES[case]
    spec = _spec(write_tiny_decoder(tmp_path, family, **config), logprob_chunk_tokens=5)
    whole = run_pass(spec, "lm_head", None)
    parts = rank_pool.run(pass_of_rank, tp, spec, "lm_head", TrainLayout(tp=tp))
    check_against_one_rank(whole, parts, spec, "lm_head")


@pytest.mark.parametrize(("case", "tp"), list(_cases(quick_tp=2)))
def test_slices_that_share_tokens_score_and_learn_as_the_whole_model(
    rank_pool: RankPool, tmp_path: Path, case: str, tp: int
) -> None:
    family, config = CASES[case]
    spec = _spec(write_tiny_decoder(tmp_path, family, **config))
    rows = slice(1, 4)
    assert _rows(spec, rows).tokens_1S.numel() == 29  # no share is as large as the first
    whole = run_pass(spec, "lm_head", None, rows)
    sharing = spec.model_copy(update={"sequence_parallel": True})
    parts = rank_pool.run(pass_of_rank, tp, sharing, "lm_head", TrainLayout(tp=tp), rows)
    check_against_one_rank(whole, parts, spec, "lm_head")


@pytest.mark.parametrize("head", ["values", "labels"])
def test_slices_that_share_tokens_give_values_and_labels_as_the_whole_model(
    rank_pool: RankPool, tmp_path: Path, head: str
) -> None:
    num_labels = {"values": 1, "labels": 3}[head]
    spec = _spec(write_tiny_decoder(tmp_path, "qwen2", head=head, num_labels=num_labels))
    rows = slice(0, 3)
    whole = run_pass(spec, head, None, rows)
    sharing = spec.model_copy(update={"sequence_parallel": True})
    parts = rank_pool.run(pass_of_rank, 2, sharing, head, TrainLayout(tp=2), rows)
    check_against_one_rank(whole, parts, spec, head)


@pytest.mark.parametrize(
    ("head", "tp"), mostly_slow((0, 3), [(h, tp) for h in ("values", "labels") for tp in (2, 4)])
)
def test_slices_give_values_and_labels_as_the_whole_model(
    rank_pool: RankPool, tmp_path: Path, head: str, tp: int
) -> None:
    num_labels = {"values": 1, "labels": 3}[head]
    spec = _spec(write_tiny_decoder(tmp_path, "qwen2", head=head, num_labels=num_labels))
    whole = run_pass(spec, head, None)
    parts = rank_pool.run(pass_of_rank, tp, spec, head, TrainLayout(tp=tp))
    check_against_one_rank(whole, parts, spec, head)


def test_a_value_head_that_the_folder_lacks_begins_at_zero_on_every_slice(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    spec = _spec(write_tiny_decoder(tmp_path, "llama"))
    for part in rank_pool.run(pass_of_rank, 2, spec, "values", TrainLayout(tp=2)):
        assert float(part.weights["score.weight"].abs().max()) == 0
        assert part.weights["score.weight"].shape == (1, 32)
        assert float(part.outputs["values"].abs().max()) == 0
        assert float(part.gradients["score.weight"].abs().max()) > 0


@pytest.mark.parametrize(
    ("compute_dtype", "recompute"), [("float32", "selective"), ("bfloat16", "full")]
)
def test_recomputation_changes_no_bit_of_a_slice(
    rank_pool: RankPool, tmp_path: Path, compute_dtype: str, recompute: str
) -> None:
    folder = write_tiny_decoder(tmp_path, "qwen3")
    plain_parts, again = (
        rank_pool.run(
            pass_of_rank,
            2,
            _spec(folder, recompute=mode, compute_dtype=compute_dtype),
            "lm_head",
            TrainLayout(tp=2),
        )
        for mode in ("none", recompute)
    )
    for part, plain in zip(again, plain_parts, strict=True):
        for name, gradient in plain.gradients.items():
            assert torch.equal(part.gradients[name], gradient), name


@pytest.mark.parametrize("case", ["llama-biases", "qwen3", "empty-vocabulary-slice"])
def test_bfloat16_slices_are_the_whole_model_with_rounded_weights_in_float32(
    rank_pool: RankPool, tmp_path: Path, case: str
) -> None:
    family, config = CASES[case]
    folder = write_tiny_decoder(tmp_path / "model", family, **config)
    rounded_copy(load_trainer_model(folder)).save_pretrained(tmp_path / "rounded")
    whole = run_pass(_spec(tmp_path / "rounded"), "lm_head", None)
    spec = _spec(folder, compute_dtype="bfloat16")
    shape = CausalLm(spec).shape
    assert shape is not None
    parts = rank_pool.run(pass_of_rank, 4, spec, "lm_head", TrainLayout(tp=4))
    distance = size = 0.0
    for at, part in enumerate(parts):
        for name, output in whole.outputs.items():
            torch.testing.assert_close(part.outputs[name], output, rtol=0, atol=TOLERANCE)
        for name, gradient in part.gradients.items():
            box = slice_box(shape, name, tp=at, size=4)
            expected = whole.gradients[name][tuple(slice(*bounds) for bounds in box)]
            distance += float((gradient - expected).square().sum())
            size += float(expected.square().sum())
    assert (distance / size) ** 0.5 < BFLOAT16_GRADIENT_TOLERANCE


def test_replicas_of_a_tensor_end_with_the_same_bits(rank_pool: RankPool, tmp_path: Path) -> None:
    """Norms on all slices, and a key-value head that two slices hold, must not drift apart."""
    spec = _spec(write_tiny_decoder(tmp_path, "qwen3"))
    parts = rank_pool.run(pass_of_rank, 4, spec, "lm_head", TrainLayout(tp=4))
    for name, gradient in parts[0].gradients.items():
        if "norm" in name:
            assert all(torch.equal(part.gradients[name], gradient) for part in parts), name
        if "k_proj" in name or "v_proj" in name:
            assert torch.equal(parts[1].gradients[name], gradient), name
            assert torch.equal(parts[2].gradients[name], parts[3].gradients[name]), name
            assert not torch.equal(parts[2].gradients[name], gradient), name


def classifier_scores(
    at: RankContext, spec: ModelSpec, layout: TrainLayout, rows_of_replica: list[list[list[int]]]
) -> tuple[list[float], list[tuple[str, int, int]]]:
    """Scores of this rank's replica's rows, and the progress that was told."""
    with at.connect(HybridLayout(layout)) as mesh:
        classifier = Classifier(spec, label=1, mesh=mesh)
        calls: list[tuple[str, int, int]] = []
        rows = rows_of_replica[mesh.dp.index]
        scores = classifier.score(rows, lambda *call: calls.append(call))
        return scores.tolist(), calls


@pytest.mark.parametrize(
    "layout",
    [TrainLayout(tp=2, pp=2), TrainLayout(dp=2, tp=2, fsdp=2), TrainLayout(dp=2, pp=2)],
    ids=str,
)
def test_a_classifier_over_ranks_scores_as_on_one(
    rank_pool: RankPool, tmp_path: Path, layout: TrainLayout
) -> None:
    spec = _spec(write_tiny_classifier(tmp_path, num_labels=3), micro_batch_tokens=6)
    # The second replica has fewer micro-batches than the first.
    rows_of_replica = [TOKEN_ROWS, TOKEN_ROWS[:1]]
    classifier = Classifier(spec, label=1)
    expected = [classifier.score(rows).tolist() for rows in rows_of_replica]
    results = rank_pool.run(classifier_scores, 4, spec, layout, rows_of_replica)
    for rank, (scores, calls) in enumerate(results):
        at = layout.coordinates(rank)
        num_rows = len(rows_of_replica[at.dp])
        assert calls[-1] == ("score", num_rows, num_rows)
        if at.pp == layout.pp - 1:
            assert scores == pytest.approx(expected[at.dp], abs=TOLERANCE)
        else:
            assert scores == []


# --- size -----------------------------------------------------------------------------------


class _Shapes(TorchDispatchMode):
    """Records the shapes of all results, save views of a mapped file."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()
        # Held, so that no other tensor gets their addresses.
        self._mapped: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            if func is torch.ops.aten.set_.source_Storage:
                self._mapped[storage.data_ptr()] = storage
            if storage.data_ptr() not in self._mapped:
                self.seen.add(tuple(tensor.shape))
        return result


def shapes_of_rank(at: RankContext, spec: ModelSpec, layout: TrainLayout) -> set[tuple[int, ...]]:
    """Shapes of every tensor that loading, a forward and a backward pass make."""
    with at.connect(HybridLayout(layout)) as mesh, _Shapes() as shapes:
        run_pass(spec, "lm_head", mesh)
        return shapes.seen


def test_no_rank_ever_makes_a_tensor_with_the_whole_vocabulary_or_inner_width(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    # Sizes that nothing else has: 640 rows (320 a slice), 176 inner (88 a slice).
    config = {"vocab_size": 640, "intermediate_size": 176}
    spec = _spec(write_tiny_decoder(tmp_path, "qwen2", **config), logprob_chunk_tokens=7)
    for seen in rank_pool.run(shapes_of_rank, 2, spec, TrainLayout(tp=2)):
        assert {(320, 32), (7, 320)} <= seen
        assert not [shape for shape in seen if 640 in shape or 176 in shape]
        # With 320 columns: logits of a chunk, and the transposed slice of the vocabulary.
        assert {shape[0] for shape in seen if len(shape) == 2 and shape[1] == 320} == {7, 32}


# --- refusals -------------------------------------------------------------------------------


def test_a_layout_that_does_not_fit_the_heads_is_refused_on_every_rank(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    config = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
    folder = write_tiny_decoder(tmp_path, "llama", **config)
    outcomes = rank_pool.outcomes(pass_of_rank, 2, _spec(folder), "lm_head", TrainLayout(tp=2))
    for outcome in outcomes:
        assert outcome.failure is not None
        assert "LayoutError: tp 2 does not divide num_attention_heads 3" in outcome.failure


def test_a_family_without_a_plan_works_on_one_rank_and_is_refused_on_two(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    folder = write_tiny_decoder(tmp_path, "gemma")
    model = CausalLm(_spec(folder))
    assert model.shape is None
    assert model.partial_gradients() == {}
    logprobs, _ = score(model, _rows(_spec(folder)), temperature=1.0)
    assert bool(logprobs.isfinite().all())
    for layout in (TrainLayout(tp=2), TrainLayout(dp=2)):
        with pytest.raises(RankFailedError, match=r"UnsupportedFamilyError: .*'gemma'.*pp=1, tp=1"):
            rank_pool.run(pass_of_rank, 2, _spec(folder), "lm_head", layout)
