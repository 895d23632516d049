"""What a model can do here is told by its config.json, and for all families by a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.family_cases import CASES, case_config
from support.tiny_models import write_tiny_llama
from typer.testing import CliRunner

from rolemesh.coordinator.commands.check import app
from rolemesh.coordinator.commands.cli import load_command
from rolemesh.engine.layout.family_records import RECORDS
from rolemesh.engine.model_folders.model_abilities import abilities_of, as_markdown, known_abilities

PAGE = (Path(__file__).parents[3] / "docs" / "model.md").read_text()
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def test_the_page_has_the_table_that_is_printed() -> None:
    assert f"\n\n{as_markdown(known_abilities())}\n\n" in PAGE


def test_every_family_has_one_line() -> None:
    families = [line.family for line in known_abilities()]
    named = [record.within or family for family, record in RECORDS.items()]
    assert [line.removesuffix(", with images") for line in families[: len(RECORDS)]] == named
    assert len(set(families)) == len(families)


@pytest.mark.parametrize("name", CASES)
def test_a_model_can_do_what_its_family_can(name: str) -> None:
    family, _ = CASES[name]
    found = abilities_of({**SIZES, **case_config(name), "model_type": family})
    of_family = next(line for line in known_abilities() if line.family == found.family)
    assert (RECORDS[family].within or family) in found.family
    assert found.sampled_by == of_family.sampled_by
    assert found.on_one_rank == "yes"
    assert found.adapters == of_family.adapters
    bound = "tp up to 2, pp, fsdp" if family == "phi3" else "tp, pp, fsdp"
    assert found.over_ranks == f"{bound}{', ep' if RECORDS[family].experts else ''}, cp"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gemma2"}, "no: the gemma2 model has attn_logit_softcapping 50.0"),
        ({"model_type": "gpt_oss"}, "no: vLLM 0.32 computes NaN"),
        ({"model_type": "mamba"}, "where transformers knows it; not tested"),
        ({"model_type": "llama", "quantization_config": {}}, "where transformers knows it"),
    ],
    ids=["soft caps", "refused", "unknown", "quantized"],
)
def test_what_a_model_cannot_do_is_said(config: dict[str, Any], words: str) -> None:
    found = abilities_of({**SIZES, "num_hidden_layers": 2, **config})
    assert found.on_one_rank.startswith(words)
    assert found.over_ranks == "no"


def test_a_bias_that_vllm_lacks_leaves_the_sampler_hf() -> None:
    config = {**SIZES, "num_hidden_layers": 2, "model_type": "qwen3", "attention_bias": True}
    assert abilities_of(config).sampled_by == "hf (vllm's model has no o_proj.bias)"


def test_check_prints_the_table_of_a_folder(tmp_path: Path) -> None:
    assert load_command("check") is not None
    folder = write_tiny_llama(tmp_path / "model")
    shown = CliRunner().invoke(app, [str(folder)])
    config = json.loads((folder / "config.json").read_text())
    assert (shown.exit_code, shown.stdout) == (0, as_markdown([abilities_of(config)]) + "\n")
    told = json.loads(CliRunner().invoke(app, [str(folder), "--json"]).stdout)
    assert (told["type"], told["family"], told["over_ranks"]) == (
        "model",
        "llama",
        "tp, pp, fsdp, cp",
    )

    file = folder / "config.json"
    file.write_text(json.dumps({**config, "model_type": "gemma2"}))
    refused = CliRunner().invoke(app, [str(folder)])
    assert refused.exit_code == 1
    assert "no: the gemma2 model has attn_logit_softcapping 50.0" in refused.stdout

    file.write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    broken = CliRunner().invoke(app, [str(folder)])
    assert broken.exit_code == 2
    assert "has neither model.safetensors nor" in broken.stderr
