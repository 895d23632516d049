"""Rows packed as a tree against each row by itself: outputs and gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex_attention
from support.kernel_cases import attended
from support.tiny_families import write_tiny_decoder
from support.tiny_models import write_tiny_llama
from support.token_batches import score
from support.updates import forward_backward, plan_whole
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.layers import shared_attention, shared_flex
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring import compute_logprobs, compute_values
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoringModel
from rolemesh.engine.packing.packed_rows import PackedRows, pack_rows
from rolemesh.engine.packing.pass_cost import DEVICE_COSTS, PassCost
from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec
from rolemesh.engine.train.trainer import Trainer

DOUBLE_TOLERANCE = 1e-6
"""Relative, of the norm. Weights and products are float64, but transformers computes norms and
rotations in float32 whatever the model is, whose rounding (6e-8) remains."""
GRADIENT_TOLERANCE = 5e-6
"""Relative, of the norm of each gradient: float32 sums in another order, as between ranks
(test_parallel_training)."""
OUTPUT_TOLERANCE = 2e-5
"""float32 through two layers, as test_models_scoring."""
BFLOAT16_TOLERANCE = 2e-2
"""Relative, of the norm: backward products of bfloat16 numbers (2**-9 each) over other blocks."""

WHATEVER = PassCost(pairs_per_token=float("inf"), pairs_per_call=100.0, margin=float("inf"))
"""Shares all that rows have in common, in blocks of similar branches."""

VOCAB = 280
PROMPTS = (
    *([5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18]),
    # Begins as prompt 2 does; then a second turn, after what the first prompt may be answered with.
    *([10, 11, 12, 40, 41], [5, 6, 7, 8, 4, 5, 30]),
)
ROWS = (
    *((0, 5), (1, 3), (0, 0), (2, 7), (0, 4), (1, 1), (0, 4), (2, 1), (2, 0)),
    *((3, 6), (4, 2), (3, 0), (4, 5), (0, 1), (2, 7)),
)
"""(prompt, completion tokens): ragged, a prompt of one token, completions of none and one."""


def shared_batch(rows: Any = ROWS, seed: int = 0) -> Experience:
    """Rows with what the losses read."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([length for _, length in rows])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = [
        # Few tokens: completions of one prompt begin alike, and some are equal.
        [*PROMPTS[number], *torch.randint(4, 7, (length,), generator=generator).tolist()]
        for number, length in rows
    ]

    def completion(scale: float, shift: float = 0.0) -> Column:
        values_N = shift + scale * torch.randn(int(offsets[-1]), generator=generator)
        return Column(ColumnKind.COMPLETION, values_N, offsets)

    return Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, tokens, torch.int64),
            "prompt_lengths": Column(
                ColumnKind.ROW, torch.tensor([len(PROMPTS[number]) for number, _ in rows])
            ),
            "loss_mask": Column(
                ColumnKind.COMPLETION,
                torch.rand(int(offsets[-1]), generator=generator) < 0.8,
                offsets,
            ),
            "advantages": completion(1.0),
            "logprobs": completion(0.3, -5.0),
            "returns": completion(1.0),
            "values": completion(0.1),
        }
    )


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares whatever it costs: these rows are too short to save much."""
    always = replace(DEVICE_COSTS["cpu"], attention_slowness=1e-9, margin=float("inf"))
    monkeypatch.setitem(DEVICE_COSTS, "cpu", always)


def _model(folder: Path, kind: str, **options: Any) -> CausalLm | ScoringModel:
    spec = ModelSpec.model_validate({"path": folder, "compute_dtype": "float32", **options})
    if kind == "policy":
        return CausalLm(spec)
    model = ScoringModel(spec, VALUE_HEAD)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model


def _folder(directory: Path, family: str) -> Path:
    if family == "smollm2":
        return write_tiny_llama(directory, seed=4, vocab_size=VOCAB)
    return write_tiny_decoder(directory, family, vocab_size=VOCAB, tie_word_embeddings=True)


def _outputs(model: CausalLm | ScoringModel, rows: PackedRows) -> list[torch.Tensor]:
    if isinstance(model, ScoringModel):
        return [model(rows)]
    logprobs_N, entropy_N = score(model, rows, temperature=0.8, with_entropy=True)
    assert entropy_N is not None
    return [logprobs_N, entropy_N]


def _gradients(model: Any, outputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a sum with random weights, so that no two tokens' gradients cancel by chance."""
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(output.shape, generator=generator).to(output) for output in outputs]
    model.zero_grad()
    sum((o * w).sum() for o, w in zip(outputs, weights, strict=True)).backward()
    return {name: weight.grad.clone() for name, weight in model.named_weights()}


def _assert_near(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float(gradient.norm()) > 0, name
        assert float((found[name] - gradient).norm() / gradient.norm()) < tolerance, name


FAMILIES = ["smollm2", "qwen2", "qwen3"]
"""Heads of another width than the others', biases, and norms of queries and keys."""
KINDS = [("policy", family) for family in FAMILIES] + [("critic", "qwen3")]


@pytest.mark.parametrize(("kind", "family"), KINDS)
def test_states_and_all_gradients_in_float64(tmp_path: Path, family: str, kind: str) -> None:
    model = _model(_folder(tmp_path, family), kind)
    model.lm.double()
    batch = shared_batch()
    shared, shared_gradients = _states_and_gradients(model, pack_rows(batch, "cpu", WHATEVER))
    padded, padded_gradients = _states_and_gradients(model, pack_rows(batch, "cpu"))
    assert float((shared - padded).norm() / padded.norm()) < DOUBLE_TOLERANCE
    _assert_near(shared_gradients, padded_gradients, DOUBLE_TOLERANCE)


def _states_and_gradients(
    model: CausalLm | ScoringModel, rows: PackedRows
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """States before completion tokens, float64, and gradients of a sum with random weights."""
    states_ND = rows.of_rows(rows.states(model.stage_forward(rows, None)))
    assert states_ND.dtype == torch.float64
    weights = torch.randn(
        states_ND.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    model.zero_grad()
    (states_ND * weights).sum().backward()
    gradients = {
        name: weight.grad.clone()
        for name, weight in model.named_weights()
        if weight.grad is not None
    }
    return states_ND.detach(), gradients


@pytest.mark.parametrize(("kind", "family"), KINDS)
def test_outputs_and_all_gradients(tmp_path: Path, family: str, kind: str) -> None:
    model = _model(_folder(tmp_path, family), kind)
    batch = shared_batch()
    found = [
        _outputs(model, rows)
        for rows in (pack_rows(batch, "cpu", WHATEVER), pack_rows(batch, "cpu"))
    ]
    for shared, padded in zip(*found, strict=True):
        torch.testing.assert_close(shared, padded, rtol=0, atol=OUTPUT_TOLERANCE)
    gradients = [_gradients(model, outputs) for outputs in found]
    _assert_near(gradients[0], gradients[1], GRADIENT_TOLERANCE)


def test_each_row_is_scored_as_if_it_were_alone(tmp_path: Path, always: None) -> None:
    """The oracle: transformers' own forward pass over each row, unpadded, with all logits."""
    model = _model(_folder(tmp_path, "qwen3"), "policy")
    batch = shared_batch()
    found = compute_logprobs(RankModel(model), batch, temperature=0.8)["logprobs"].values
    with torch.no_grad():
        expected = _alone(model, batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=OUTPUT_TOLERANCE)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_no_gradient(tmp_path: Path, mode: str, compute_dtype: str) -> None:
    folder = _folder(tmp_path, "smollm2")
    rows = pack_rows(shared_batch(), "cpu", WHATEVER)
    gradients = []
    for recompute in ("none", mode):
        model = _model(folder, "policy", recompute=recompute, compute_dtype=compute_dtype)
        gradients.append(_gradients(model, _outputs(model, rows)))
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_bfloat16_gradients_are_near(tmp_path: Path, kind: str) -> None:
    model = _model(_folder(tmp_path, "smollm2"), kind, compute_dtype="bfloat16")
    batch = shared_batch()
    found = [
        _gradients(model, _outputs(model, rows))
        for rows in (pack_rows(batch, "cpu", WHATEVER), pack_rows(batch, "cpu"))
    ]
    _assert_near(found[0], found[1], BFLOAT16_TOLERANCE)


def test_prompts_without_any_completion_leave_no_trace(tmp_path: Path) -> None:
    model = _model(_folder(tmp_path, "smollm2"), "policy")
    rows = pack_rows(shared_batch([(0, 0), (0, 0), (1, 0)]), "cpu", WHATEVER)
    logprobs_N, _ = score(model, rows, temperature=1.0)  # type: ignore[union-attr]
    assert logprobs_N.shape == (0,)
    logprobs_N.sum().backward()
    for name, weight in model.named_weights():
        assert weight.grad is not None, name
        assert float(weight.grad.abs().max()) == 0, name


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-13)], ids=str
)
def test_many_short_rows_attend_by_products_as_by_the_kernel(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float
) -> None:
    """Rows that share a prompt, and prompts by themselves; sums in another order."""
    found = {}
    asked = 0
    real = shared_attention._attend_by_products

    def counting(*args: Any) -> torch.Tensor:
        nonlocal asked
        asked += 1
        return real(*args)

    monkeypatch.setattr(shared_attention, "_attend_by_products", counting)
    for least in (1, 10**9):
        monkeypatch.setattr(shared_attention, "MANY_HEADS", least)
        before = asked
        found[least] = attended("cpu", 2, 20, (5, 30, 1, 9), dtype=dtype)
        assert (asked > before) == (least == 1)
    for name, expected in found[10**9].items():
        error = (found[1][name] - expected).abs().max()
        assert error <= tolerance * expected.abs().max(), name


@pytest.mark.parametrize("autocasts", [False, True], ids=["bfloat16", "autocast"])
def test_attention_by_products_is_as_near_as_the_kernel(
    monkeypatch: pytest.MonkeyPatch, autocasts: bool
) -> None:
    """In bfloat16 on a CPU, against float64 on the same numbers."""

    def found(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return attended("cpu", 2, 20, (5, 30, 1, 9), dtype=dtype, rounded=torch.bfloat16)

    def narrow() -> dict[str, torch.Tensor]:
        # Under autocast rotated queries and keys are float32.
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            return found(torch.float32 if autocasts else torch.bfloat16)

    exact, by_products = found(torch.float64), narrow()
    assert by_products["attended"].dtype == torch.bfloat16
    monkeypatch.setattr(shared_attention, "MOST_SCORES", 0)
    for name, by_kernel in narrow().items():
        expected = exact[name]
        error, of_kernel = (
            float((one - expected).norm() / expected.norm())
            for one in (by_products[name], by_kernel)
        )
        # The kernel rounds the weights of the values, too. Under autocast both round the gradient
        # of a query last: 3.4e-3 and 3.3e-3.
        assert error < 1.1 * of_kernel < BFLOAT16_TOLERANCE
        assert not torch.equal(by_products[name], by_kernel)


# --- FlexAttention ------------------------------------------------------------------------


@pytest.fixture
def by_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ROLEMESH_KERNELS=triton has it on a GPU, but computed plainly, with all scores.

    Torch 2.13 refuses gradients on a CPU, although it has the plain backward pass.
    """
    monkeypatch.setattr(shared_attention, "flex_serves", lambda device: True)
    monkeypatch.setattr(torch_flex_attention, "_validate_device", lambda *tensors: None)
    # Otherwise it warns that it was not compiled.
    monkeypatch.setattr(torch_flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("by_flex")
def test_flex_attention_has_the_values_and_gradients_of_rectangles(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(_folder(tmp_path, family), "policy")
    model.lm.double()
    rows = pack_rows(shared_batch(), "cpu", WHATEVER)
    assert shared_attention.inputs_of(rows.layout)["tree"].block_mask is not None
    flex, flex_gradients = _states_and_gradients(model, rows)
    monkeypatch.undo()
    assert shared_attention.inputs_of(rows.layout)["tree"].block_mask is None
    expected, gradients = _states_and_gradients(model, rows)
    assert float((flex - expected).norm() / expected.norm()) < DOUBLE_TOLERANCE
    _assert_near(flex_gradients, gradients, DOUBLE_TOLERANCE)


def test_the_mask_of_a_pass_is_traced_once_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it is compiled, and each pass has its own number of tokens."""
    counter = CompileCounter()
    traced = torch.compile(shared_flex.create_block_mask, dynamic=True, backend=counter)
    for number in (1, 9, 3):
        rows = [(prompt, 1 + (11 * at) % 40) for at, (prompt, _) in enumerate(ROWS * number)]
        tree = pack_rows(shared_batch(rows), "cpu", WHATEVER).layout
        found = []
        for make in (create_block_mask, traced):
            monkeypatch.setattr(shared_flex, "create_block_mask", make)
            mask = shared_flex.with_block_mask(tree).block_mask
            assert mask is not None
            found.append([one for one in mask.as_tuple() if isinstance(one, torch.Tensor)])
        expected, compiled = found
        assert all(map(torch.equal, expected, compiled))
    assert counter.frame_count == 1


def test_flex_attention_over_many_blocks(by_flex: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 tokens each, of which some are whole, some cut and most empty."""
    found = attended("cpu", 2, 150, (300, 1, 70, 9))
    monkeypatch.undo()
    for name, expected in attended("cpu", 2, 150, (300, 1, 70, 9)).items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=OUTPUT_TOLERANCE)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_flex_attention_under_autocast_and_recomputed(
    tmp_path: Path, recompute: str, by_flex: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(tmp_path, "smollm2")
    model = _model(folder, "policy", compute_dtype="bfloat16", recompute=recompute)
    rows = pack_rows(shared_batch(), "cpu", WHATEVER)
    found = _gradients(model, _outputs(model, rows))
    monkeypatch.undo()
    _assert_near(found, _gradients(model, _outputs(model, rows)), BFLOAT16_TOLERANCE)


# --- whole batches ------------------------------------------------------------------------


def _ways(folder: Path, **options: Any) -> list[ModelSpec]:
    """With and without sharing."""
    return [
        ModelSpec.model_validate(
            {"path": folder, "compute_dtype": "float32", "share_prefixes": way, **options}
        )
        for way in ("auto", "never")
    ]


def _shares(trainer: Trainer, batch: Experience) -> int:
    passes = trainer.rank_model.micro_batches(batch)
    return sum(len(one.rows) for one in passes if one.shares)


@pytest.mark.parametrize("budget", [1, 24, 4096])
def test_columns_come_back_row_by_row(tmp_path: Path, always: None, budget: int) -> None:
    folder = _folder(tmp_path, "smollm2")
    batch = shared_batch()
    scored, values = [], []
    for spec in _ways(folder, micro_batch_tokens=budget):
        scored.append(
            compute_logprobs(RankModel(CausalLm(spec)), batch, temperature=1.0, with_entropy=True)
        )
        critic = ScoringModel(spec, VALUE_HEAD)
        torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
        values.append(compute_values(RankModel(critic), batch))
    for name in ("logprobs", "entropy"):
        assert torch.equal(scored[0][name].offsets, scored[1][name].offsets)
        torch.testing.assert_close(
            scored[0][name].values, scored[1][name].values, rtol=0, atol=OUTPUT_TOLERANCE
        )
    torch.testing.assert_close(values[0].values, values[1].values, rtol=0, atol=OUTPUT_TOLERANCE)


@pytest.mark.parametrize("rows_per_unit", [1, 3])
def test_a_training_step_is_the_same(tmp_path: Path, always: None, rows_per_unit: int) -> None:
    folder = _folder(tmp_path, "smollm2")
    batch = shared_batch()
    found = []
    for spec in _ways(folder, micro_batch_tokens=40):
        trainer = Trainer.policy(spec, OptimizerSpec())
        assert (_shares(trainer, batch) > 4) == (spec.share_prefixes == "auto")
        metrics, outputs = trainer.forward_backward(
            batch,
            PpoPolicyLossSpec(entropy_coefficient=0.01),
            plan_whole(trainer, batch, rows_per_unit),
        )
        gradients = {name: w.grad.clone() for name, w in trainer.model.named_weights()}
        found.append((metrics, outputs["logprobs"], gradients))
    (shared, outputs, gradients), (expected, padded, padded_gradients) = found
    assert shared.keys() == expected.keys()
    fraction = shared.pop("computed_fraction")
    tokens = batch["tokens"].values
    passes = Trainer.policy(_ways(folder, micro_batch_tokens=40)[0], OptimizerSpec())
    computed = sum(one.num_tokens for one in passes.rank_model.micro_batches(batch, rows_per_unit))
    assert fraction == computed / len(tokens) < expected.pop("computed_fraction") == 1.0
    for name, number in expected.items():
        assert shared[name] == pytest.approx(number, rel=1e-5, abs=1e-6), name
    torch.testing.assert_close(outputs.values, padded.values, rtol=0, atol=OUTPUT_TOLERANCE)
    _assert_near(gradients, padded_gradients, GRADIENT_TOLERANCE)


def test_two_passes_have_the_same_bits(tmp_path: Path, always: None) -> None:
    batch = shared_batch()
    trainer = Trainer.policy(_ways(_folder(tmp_path, "smollm2"))[0], OptimizerSpec())
    found = []
    for _ in range(2):
        forward_backward(trainer, batch, PpoPolicyLossSpec())
        found.append([weight.grad.clone() for _, weight in trainer.model.named_weights()])
        trainer.drop_gradients()
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_without_a_common_prompt_no_bit_differs(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "smollm2")
    batch = shared_batch([(0, 5), (1, 3), (2, 7)])
    found = []
    for spec in _ways(folder):
        trainer = Trainer.policy(spec, OptimizerSpec())
        assert _shares(trainer, batch) == 0
        forward_backward(trainer, batch, PpoPolicyLossSpec())
        found.append([weight.grad.clone() for _, weight in trainer.model.named_weights()])
    assert all(torch.equal(left, right) for left, right in zip(*found, strict=True))


def test_a_mask_of_padded_rows_is_heeded(tmp_path: Path) -> None:
    """Whoever calls the model with a mask of its own, e.g. to sample, gets what it asks for."""
    model = _model(_folder(tmp_path, "smollm2"), "policy")
    assert model.packing is not None
    row = [5, 6, 7, 8]
    with torch.no_grad():
        padded = model.lm(
            input_ids=torch.tensor([[9, 9, *row]]),
            attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1]]),
            position_ids=torch.tensor([[0, 0, 0, 1, 2, 3]]),
        ).logits[0, 2:]
        alone = model.lm(input_ids=torch.tensor([row])).logits[0]
    torch.testing.assert_close(padded, alone, rtol=0, atol=OUTPUT_TOLERANCE)


# --- attention of other kinds -------------------------------------------------------------

_EVERY_OTHER = {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]}
"""Rows are longer than the window, and so are most prompts."""

OTHERS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 3},
    "qwen2": {"use_sliding_window": True, **_EVERY_OTHER},
    "olmo3": _EVERY_OTHER,
    "gemma3_text": _EVERY_OTHER,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt2": {},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
}
"""With layers that look back only so far, and with experts; the last ones take rectangles alone."""

RECTANGLES = frozenset({"gpt2", "falcon_h1"})
"""The second carries a state from token to token, and says so in no list of its config."""


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("family", OTHERS)
def test_other_attention_is_that_of_each_row_by_itself(
    tmp_path: Path, family: str, shares: bool
) -> None:
    """The oracle is transformers' own pass over each row."""
    options = OTHERS[family]
    folder = write_tiny_decoder(tmp_path, family, vocab_size=VOCAB, **options)
    model = _model(folder, "policy")
    assert (model.packing is None) == (family in RECTANGLES)
    batch = shared_batch()
    rows = pack_rows(batch, "cpu", replace(WHATEVER, shares=shares and family not in RECTANGLES))
    outputs = _outputs(model, rows)[:1]
    gradients = _gradients(model, outputs)
    expected = [_alone(model, batch)]
    torch.testing.assert_close(outputs, expected, rtol=0, atol=OUTPUT_TOLERANCE)
    _assert_near(gradients, _gradients(model, expected), GRADIENT_TOLERANCE)
    if "sliding_window" in options:
        far = write_tiny_decoder(
            tmp_path / "far", family, vocab_size=VOCAB, **{**options, "sliding_window": 64}
        )
        difference = _alone(_model(far, "policy"), batch) - expected[0]
        assert float(difference.detach().abs().max()) > 1e-2, "nothing is out of sight"


def _alone(model: Any, batch: Experience) -> torch.Tensor:
    """Log-probs of each row by transformers' own pass over it."""
    rows = zip(batch["tokens"].rows(), batch["prompt_lengths"].values.tolist(), strict=True)
    logprobs = [
        (model.lm(tokens[None]).logits[0, prompt - 1 : -1] / 0.8)
        .log_softmax(-1)
        .gather(1, tokens[prompt:, None])
        .squeeze(1)
        for tokens, prompt in rows
    ]
    return torch.cat(logprobs)
