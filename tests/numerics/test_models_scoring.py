"""Models on transformers: log-probs, values and scores against transformers' own forward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny_models import END_ID, PAD_ID, write_tiny_classifier, write_tiny_llama
from support.token_batches import score, token_batch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.model_folders.model_files import ModelFolderError
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.classifier import Classifier
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring import compute_logprobs, compute_values
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoringModel
from rolemesh.engine.packing.packed_rows import pack_rows
from rolemesh.engine.specs import ModelSpec

TOLERANCE = 2e-5
"""float32 through two layers, with sums in another order because the batch is cut otherwise."""
BFLOAT16_STEP = 0.15
"""How far bfloat16 products through two layers may move log-probs between -12 and -1."""


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama"), seed=1, tied=request.param)


def _spec(path: Path, **options: object) -> ModelSpec:
    return ModelSpec.model_validate({"path": path, "compute_dtype": "float32", **options})


def _expected_logprobs(
    path: Path, batch: Experience, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: each row alone and unpadded, with all logits."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logprobs, entropies = [], []
    for tokens, prompt in zip(
        batch["tokens"].rows(), batch["prompt_lengths"].values.tolist(), strict=True
    ):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, prompt - 1 : -1] / temperature
        table = logits.log_softmax(-1)
        logprobs.append(table.gather(1, tokens[prompt:, None]).squeeze(1))
        entropies.append(-(table.exp() * table).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 10_000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_those_of_each_row_alone(
    folder: Path, temperature: float, micro_batch_tokens: int
) -> None:
    batch = token_batch()
    model = CausalLm(_spec(folder, micro_batch_tokens=micro_batch_tokens, logprob_chunk_tokens=5))
    calls: list[tuple[str, int, int]] = []
    result = compute_logprobs(
        RankModel(model),
        batch,
        temperature=temperature,
        with_entropy=True,
        progress=lambda *call: calls.append(call),
    )
    logprobs, entropies = _expected_logprobs(folder, batch, temperature)
    torch.testing.assert_close(result["logprobs"].values, logprobs, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(result["entropy"].values, entropies, rtol=0, atol=TOLERANCE)
    assert calls[-1] == ("logprobs", batch.num_rows, batch.num_rows)
    assert not result["logprobs"].values.requires_grad


def test_bfloat16_products_see_a_changed_weight_at_the_next_pass(folder: Path) -> None:
    batch = token_batch()
    model = CausalLm(_spec(folder, compute_dtype="bfloat16"))
    before = compute_logprobs(RankModel(model), batch, temperature=1.0)["logprobs"].values
    with torch.no_grad():
        for _, weight in model.named_weights():
            weight *= 1.5
    after = compute_logprobs(RankModel(model), batch, temperature=1.0)["logprobs"].values
    assert float((before - after).abs().max()) > 2 * BFLOAT16_STEP


def test_a_batch_without_rows_gives_columns_without_rows(folder: Path) -> None:
    batch = token_batch().slice(0, 0)
    result = compute_logprobs(
        RankModel(CausalLm(_spec(folder))), batch, temperature=1.0, with_entropy=True
    )
    assert result.num_rows == 0
    assert set(result.columns) == {"logprobs", "entropy"}


def test_rows_without_completion_take_no_part(folder: Path) -> None:
    batch = token_batch(prompt_lengths=(4, 3, 5), completion_lengths=(0, 2, 0))
    result = compute_logprobs(RankModel(CausalLm(_spec(folder))), batch, temperature=1.0)
    assert result["logprobs"].lengths().tolist() == [0, 2, 0]


def test_embedding_of_the_pad_token_gets_its_gradient(folder: Path) -> None:
    """Transformers pads with a token that chat prompts contain; torch would drop its gradient."""
    tokens = Column.ragged(ColumnKind.SEQUENCE, [[9, PAD_ID, 11, 12]], torch.int64)
    batch = Experience(
        {"tokens": tokens, "prompt_lengths": Column(ColumnKind.ROW, torch.tensor([2]))}
    )
    model = CausalLm(_spec(folder))
    score(model, pack_rows(batch, "cpu"), temperature=1.0)[0].sum().backward()
    gradient = model.lm.get_input_embeddings().weight.grad
    assert float(gradient[PAD_ID].abs().max()) > 0


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_changes_no_gradient(folder: Path, mode: str, compute_dtype: str) -> None:
    batch = pack_rows(token_batch(), "cpu")
    gradients = []
    for recompute in ("none", mode):
        model = CausalLm(_spec(folder, recompute=recompute, compute_dtype=compute_dtype))
        logprobs, _ = score(model, batch, temperature=1.0)
        logprobs.square().sum().backward()
        gradients.append({name: weight.grad for name, weight in model.named_weights()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_runs_the_wrapped_part_again(folder: Path, mode: str) -> None:
    model = CausalLm(_spec(folder, recompute=mode))
    calls: list[str] = []
    model.lm.base_model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda *_: calls.append("q_proj")
    )
    rows = pack_rows(token_batch(), "cpu")
    score(model, rows, temperature=1.0)[0].sum().backward()
    assert len(calls) == 2
    with torch.no_grad():
        score(model, rows, temperature=1.0)
    assert len(calls) == 3


def test_num_layers_keeps_the_first_layers(folder: Path) -> None:
    batch = token_batch()
    short = CausalLm(_spec(folder, num_layers=1))
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    del whole.model.layers[1]
    tokens = next(batch["tokens"].rows())[None]
    with torch.no_grad():
        expected = whole.model(tokens, use_cache=False).last_hidden_state
        ours = short.lm.base_model(tokens, use_cache=False).last_hidden_state
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)
    with pytest.raises(ValueError, match=r"num_layers is 3.*has 2 layers.*at most"):
        CausalLm(_spec(folder, num_layers=3))


# --- values -------------------------------------------------------------------------------


def test_first_values_are_zero_and_the_head_learns_from_the_first_step(folder: Path) -> None:
    model = ScoringModel(_spec(folder), VALUE_HEAD)
    batch = token_batch()
    values = compute_values(RankModel(model), batch)
    assert values.kind is ColumnKind.COMPLETION
    assert values.values.dtype == torch.float32
    assert float(values.values.abs().max()) == 0
    (model(pack_rows(batch, "cpu")) - 1).square().sum().backward()
    assert float(model.head.weight.grad.abs().max()) > 0


def test_values_are_those_of_the_state_before_each_token(folder: Path) -> None:
    model = ScoringModel(_spec(folder), VALUE_HEAD)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        model.head.weight.copy_(torch.randn(model.head.weight.shape, generator=generator))
        model.head.bias.fill_(0.5)
    batch = token_batch()
    expected = []
    for tokens, prompt in zip(
        batch["tokens"].rows(), batch["prompt_lengths"].values.tolist(), strict=True
    ):
        with torch.no_grad():
            expected.append(model.lm(tokens[None]).logits[0, prompt - 1 : -1, 0])
    values = compute_values(RankModel(model), batch).values
    torch.testing.assert_close(values, torch.cat(expected), rtol=0, atol=10 * TOLERANCE)


def test_value_before_a_token_does_not_depend_on_it(folder: Path) -> None:
    model = ScoringModel(_spec(folder), VALUE_HEAD)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(3))
    prompt, completion = [5, 6, 7], [8, 9, 10]

    def values(tokens: list[int]) -> torch.Tensor:
        return compute_values(
            RankModel(model),
            Experience(
                {
                    "tokens": Column.ragged(ColumnKind.SEQUENCE, [tokens], torch.int64),
                    "prompt_lengths": Column(ColumnKind.ROW, torch.tensor([3])),
                }
            ),
        ).values

    changed = (values(prompt + completion) - values([*prompt, 8, 44, 10])).abs()
    assert float(changed[:2].max()) == 0
    assert float(changed[2]) > 0


def test_value_head_is_loaded_from_a_folder_that_has_one(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1)
    torch.nn.init.constant_(model.score.weight, 0.25)
    model.save_pretrained(tmp_path)
    loaded = ScoringModel(_spec(tmp_path), VALUE_HEAD)
    assert torch.equal(loaded.head.weight, torch.full_like(loaded.head.weight, 0.25))


# --- classifier ---------------------------------------------------------------------------


def test_classifier_scores_do_not_depend_on_padding_or_on_the_pad_id(tmp_path: Path) -> None:
    path = write_tiny_classifier(tmp_path / "classifier", seed=2, num_labels=3)
    rows = [[5, 6, 7, 8], [9], [10, 11, PAD_ID], [12, END_ID], [13, 14, 15, 16, 17, 18]]
    oracle = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    expected = []
    for row in rows:
        with torch.no_grad():
            hidden = oracle.model(torch.tensor([row])).last_hidden_state
            expected.append(oracle.score(hidden)[0, -1, 2])
    for budget in (1, 8, 1000):
        scores = Classifier(_spec(path, micro_batch_tokens=budget), label=2).score(rows)
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores, torch.stack(expected), rtol=0, atol=TOLERANCE)


def test_classifier_refuses_an_unknown_label_and_an_empty_or_overlong_row(tmp_path: Path) -> None:
    path = write_tiny_classifier(tmp_path / "classifier", max_position_embeddings=8)
    with pytest.raises(ValueError, match=r"label is 2.*has 2 labels.*0 to 1"):
        Classifier(_spec(path), label=2)
    classifier = Classifier(_spec(path))
    with pytest.raises(ValueError, match="row 1 has no tokens"):
        classifier.score([[1], []])
    with pytest.raises(ValueError, match=r"row 0 has 9 tokens.*at most 8"):
        classifier.score([[1] * 9])
    assert classifier.score([]).shape == (0,)
    assert classifier.encode([]) == []
    assert [len(row) > 0 for row in classifier.encode(["ab", "1 + 2"])] == [True, True]


# --- folders ------------------------------------------------------------------------------


def test_a_missing_folder_is_named_with_its_field_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"model\.path '.*nowhere' does not exist: give a"):
        CausalLm(_spec(tmp_path / "nowhere"))
    with pytest.raises(ModelFolderError, match=r"model\.path '.*' has no config\.json"):
        ScoringModel(_spec(tmp_path), VALUE_HEAD)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"neither model\.safetensors nor"):
        CausalLm(_spec(path))
    (path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}}'
    )
    with pytest.raises(ModelFolderError, match=r"lacks 'model-00001\.safetensors' \(2 of 2"):
        CausalLm(_spec(path))


def test_a_folder_that_lacks_a_parameter_is_refused(tmp_path: Path) -> None:
    path = write_tiny_classifier(tmp_path / "classifier")
    with pytest.raises(ModelFolderError, match=r"lacks the weights \['lm_head\.weight'\]"):
        CausalLm(_spec(path))
