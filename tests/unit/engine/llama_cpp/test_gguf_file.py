"""What a GGUF file says of a model, read back by the format's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.adapters import ALPHA, RANK, write_adapter
from support.gguf_models import CASES, SIZES, exported, save_checkpoint, write_model
from transformers import AutoConfig, AutoModelForCausalLM

from rolemesh.engine.layout.manifest import Parameter
from rolemesh.engine.llama_cpp.architecture import UnwritableModelError
from rolemesh.engine.llama_cpp.gguf_file import GgufFile
from rolemesh.engine.specs import GgufType
from rolemesh.engine.train.export import export_policy, main
from rolemesh.engine.weights.checkpoints.folders import FolderExistsError

HEADS, KV_HEADS = 4, 2
LAYER = "model.layers.1"

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    f"{LAYER}.input_layernorm.weight": "blk.1.attn_norm.weight",
    f"{LAYER}.post_attention_layernorm.weight": "blk.1.ffn_norm.weight",
    f"{LAYER}.self_attn.q_proj.weight": "blk.1.attn_q.weight",
    f"{LAYER}.self_attn.q_proj.bias": "blk.1.attn_q.bias",
    f"{LAYER}.self_attn.k_proj.weight": "blk.1.attn_k.weight",
    f"{LAYER}.self_attn.k_proj.bias": "blk.1.attn_k.bias",
    f"{LAYER}.self_attn.v_proj.weight": "blk.1.attn_v.weight",
    f"{LAYER}.self_attn.v_proj.bias": "blk.1.attn_v.bias",
    f"{LAYER}.self_attn.o_proj.weight": "blk.1.attn_output.weight",
    f"{LAYER}.self_attn.o_proj.bias": "blk.1.attn_output.bias",
    f"{LAYER}.self_attn.q_norm.weight": "blk.1.attn_q_norm.weight",
    f"{LAYER}.self_attn.k_norm.weight": "blk.1.attn_k_norm.weight",
    f"{LAYER}.mlp.gate_proj.weight": "blk.1.ffn_gate.weight",
    f"{LAYER}.mlp.gate_proj.bias": "blk.1.ffn_gate.bias",
    f"{LAYER}.mlp.up_proj.weight": "blk.1.ffn_up.weight",
    f"{LAYER}.mlp.up_proj.bias": "blk.1.ffn_up.bias",
    f"{LAYER}.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    f"{LAYER}.mlp.down_proj.bias": "blk.1.ffn_down.bias",
}


def tensors_of(file: Path) -> dict[str, Any]:
    return {one.name: one for one in gguf.GGUFReader(file).tensors}


def settings_of(file: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in gguf.GGUFReader(file).fields.items()}


def by_neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i + half * size/2 of a head becomes its row 2 i + half, one at a time."""
    size = len(rows) // heads
    found = np.empty_like(rows)
    for head in range(heads):
        for at in range(size // 2):
            for half in range(2):
                found[head * size + 2 * at + half] = rows[head * size + half * (size // 2) + at]
    return found


@pytest.mark.parametrize("name", CASES)
def test_all_weights_are_there_under_llama_cpps_names(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", name)
    stored = tensors_of(exported(model, tmp_path, "f32"))
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    is_llama = name.startswith(("llama", "mistral"))
    weights = dict(lm.named_parameters())
    # The other layer has the same names.
    for old, weight in weights.items():
        if ".layers.0." in old:
            found = stored[NAMES[old.replace(".0.", ".1.")].replace(".1.", ".0.")]
        else:
            found = stored[NAMES[old]]
        assert found.tensor_type == gguf.GGMLQuantizationType.F32
        # Sizes are told from the innermost one.
        assert tuple(found.shape) == tuple(reversed(weight.shape))
        expected = weight.detach().numpy()
        if is_llama and ("q_proj" in old or "k_proj" in old):
            expected = by_neighbours(expected, HEADS if "q_proj" in old else KV_HEADS)
        assert np.array_equal(found.data, expected), old
    assert len(stored) == len(weights) + (name == "llama-3")
    assert ("output.weight" in stored) == (not lm.config.tie_word_embeddings)


def test_frequencies_of_llama_3_are_divided_as_transformers_divides_them(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama-3")
    factors = tensors_of(exported(model, tmp_path, "q8_0"))["rope_freqs.weight"].data
    # The three ranges of arXiv 2407.21783's implementation, for 16 frequencies.
    for at, factor in enumerate(factors):
        length = 2 * np.pi * 10000.0 ** (2 * at / SIZES["head_dim"])
        if length < 64 / 4:
            expected = 1.0
        elif length > 64 / 1:
            expected = 8.0
        else:
            share = (64 / length - 1) / (4 - 1)
            expected = 1 / ((1 - share) / 8 + share)
        assert factor == pytest.approx(expected, rel=1e-5)
    assert {1.0, 8.0} < {round(float(one), 3) for one in factors}


def test_settings_are_those_of_the_model(tmp_path: Path) -> None:
    told = settings_of(exported(write_model(tmp_path / "model", "mistral"), tmp_path, "q8_0"))
    assert told["general.architecture"] == "llama"
    assert told["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    of = {key.removeprefix("llama."): value for key, value in told.items() if "llama." in key}
    assert of.pop("attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert of == {
        # That of the window: llama.cpp has none.
        "context_length": 192,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "vocab_size": 512,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "rope.dimension_count": 32,
        "rope.freq_base": 10000.0,
    }
    sampling = {key: told[f"general.sampling.{key}"] for key in ("temp", "top_k", "top_p", "min_p")}
    assert sampling == {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_narrow_types_round_matrices_alone(kind: GgufType, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "llama-biases")
    exact = tensors_of(exported(model, tmp_path, "f32"))
    narrow = tensors_of(exported(model, tmp_path, kind))
    assert list(narrow) == list(exact)
    assert (tmp_path / f"{kind}.gguf").stat().st_size < (tmp_path / "f32.gguf").stat().st_size
    for name, one in narrow.items():
        values = exact[name].data
        if values.ndim == 1:
            assert np.array_equal(one.data, values), name
            continue
        assert one.tensor_type.name == kind.upper()
        assert tuple(one.shape) == tuple(exact[name].shape)
        found = gguf.dequantize(one.data, one.tensor_type).astype(np.float64)
        wide = values.astype(np.float64)
        if kind == "q8_0":
            # 32 values share a step, the greatest over 127: half a step of rounding, and the step
            # itself in float16, 127 times at most. 2**-25 is half of float16's smallest number.
            step = np.abs(wide.reshape(-1, 32)).max(-1, keepdims=True) / 127
            bound = step / 2 + 127 * np.maximum(step * 2.0**-11, 2.0**-25)
            error = np.abs(found - wide).reshape(-1, 32)
            # A little more for the float32 in which the quotient is computed.
            assert (error <= bound * (1 + 1e-5)).all(), name
            assert error.max() > step.min() / 8
        else:
            relative = 2.0**-11 if kind == "f16" else 2.0**-8
            assert (np.abs(found - wide) <= np.abs(wide) * relative + 2.0**-25).all(), name


def test_a_merged_adapter_is_the_sum_in_one_file(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", "llama")
    adapter = write_adapter(tmp_path / "adapter", base)
    section = {"rank": RANK, "alpha": ALPHA, "from": adapter}
    checkpoint = save_checkpoint(base, tmp_path / "checkpoint", adapter=section)
    file = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match="is of an adapter: give --merge"):
        export_policy(checkpoint, base, file, gguf="f32")
    assert export_policy(checkpoint, base, file, gguf="f32", merges=True).endswith("f32")
    export_policy(checkpoint, base, tmp_path / "folder", "float32", merges=True)
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    stored = tensors_of(file)["blk.1.attn_q.weight"].data
    name = f"{LAYER}.self_attn.q_proj.weight"
    expected = by_neighbours(lm.get_parameter(name).detach().numpy(), HEADS)
    assert np.array_equal(stored, expected)
    assert not np.array_equal(
        stored, by_neighbours(plain.get_parameter(name).detach().numpy(), HEADS)
    )


# --- refusals -------------------------------------------------------------------------------


def file_of(folder: Path, kind: GgufType = "f32", **changes: Any) -> GgufFile:
    """The plan of a file, of a config alone and one parameter."""
    write_model(folder / "model", "llama")
    config = AutoConfig.for_model(changes.pop("family", "llama"), **{**SIZES, **changes})
    manifest = {"model.embed_tokens.weight": Parameter((512, config.hidden_size), "float32")}
    return GgufFile(
        folder / "model.gguf",
        kind,
        config=config,
        manifest=manifest,
        source=folder / "model",
        stop_tokens=(2,),
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"family": "gemma2"},
            "of the family 'gemma2', and known are llama, mistral, ",
        ),
        ({"hidden_act": "gelu"}, "hidden_act of the model is 'gelu'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type of the model is 'dynamic', and known for llama are default, llama3",
        ),
        (
            {
                "family": "qwen2",
                "hidden_size": 128,
                "num_attention_heads": 4,
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
            },
            "rope_type of the model is 'yarn', and known for qwen2 are default",
        ),
        ({"family": "qwen2", "head_dim": 8}, "llama.cpp has 2 for qwen2"),
        ({"vocab_size": 399}, r"has the token 399, and the model 399 of them"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UnwritableModelError, match=why) as raised:
        file_of(tmp_path, **changes)
    assert "export it as a Hugging Face folder, without --gguf" in str(raised.value)
    assert not (tmp_path / "model.gguf").exists()


def test_rows_that_no_blocks_fill_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnwritableModelError, match=r"blocks of 32, and 'model.embed.*rows of 48"):
        file_of(tmp_path, "q8_0", hidden_size=48, num_attention_heads=4, num_key_value_heads=2)


def test_a_weight_beyond_float16_leaves_no_file(tmp_path: Path) -> None:
    large = torch.full((512, 64), 1e5)
    with pytest.raises(UnwritableModelError, match="has a weight of 100000: give bf16"):
        file_of(tmp_path, "f16").write([("model.embed_tokens.weight", large)])
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


def test_nothing_but_a_gguf_file_is_replaced(tmp_path: Path) -> None:
    ones = [("model.embed_tokens.weight", torch.ones(512, 64))]
    (tmp_path / "model.gguf").write_bytes(b"GGUF of yesterday")
    file_of(tmp_path).write(ones)
    assert set(tensors_of(tmp_path / "model.gguf")) == {"token_embd.weight"}
    (tmp_path / "model.gguf").write_text("notes")
    with pytest.raises(FolderExistsError, match="is no GGUF file, which alone is replaced"):
        file_of(tmp_path)
    assert (tmp_path / "model.gguf").read_text() == "notes"


def test_the_command_says_how_to_install_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ModuleNotFoundError("No module named 'gguf'", name="gguf")

    monkeypatch.setattr("rolemesh.engine.train.export.export_policy", fail)
    words = ("--checkpoint", "x", "--model", "y", "--out", str(tmp_path / "z"), "--gguf", "f32")
    assert main(list(words)) == 1
    assert "--gguf needs the package gguf: pip install 'gguf" in capsys.readouterr().err
