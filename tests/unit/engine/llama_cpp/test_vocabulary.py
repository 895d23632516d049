"""How a tokenizer is told to llama.cpp, and which ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.gguf_models import NUM_TOKENS, PRES, TOOL, VOCAB_SIZE, bpe_tokenizer

from rolemesh.engine.llama_cpp.architecture import UnwritableModelError
from rolemesh.engine.llama_cpp.vocabulary import read_vocabulary
from rolemesh.quickstart.tiny_model import CHAT_TEMPLATE, END, PAD, START

KINDS = gguf.TokenType


@pytest.mark.parametrize("adds_start", [False, True])
@pytest.mark.parametrize("pre", PRES)
def test_a_tokenizer_is_told_by_what_it_does(pre: str, adds_start: bool, tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer(pre, adds_start=adds_start)
    tokenizer.save_pretrained(tmp_path)
    found = read_vocabulary(tmp_path, VOCAB_SIZE, (2, 5))
    assert found.pre == pre
    assert found.adds_start == adds_start
    assert len(found.tokens) == len(found.types) == len(set(found.tokens)) == VOCAB_SIZE
    assert list(found.tokens[:3]) == [PAD, START, END]
    assert list(found.types[:3]) == [KINDS.CONTROL] * 3
    assert found.tokens[NUM_TOKENS - 1] == TOOL
    assert found.types[NUM_TOKENS - 1] == KINDS.USER_DEFINED
    assert set(found.types[NUM_TOKENS:]) == {KINDS.UNUSED}
    ordinary = range(3, NUM_TOKENS - 1)
    assert {found.types[at] for at in ordinary} == {KINDS.NORMAL}
    assert list(found.tokens[3 : NUM_TOKENS - 1]) == tokenizer.convert_ids_to_tokens(list(ordinary))
    merges = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["merges"]
    assert [one.split(" ") for one in found.merges] == merges
    assert found.chat_template == CHAT_TEMPLATE
    assert found.named == {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5,
    }


def test_nfc_of_qwen_is_left_to_whoever_writes_the_text(tmp_path: Path) -> None:
    save(tmp_path, "qwen2", lambda content: content.update(normalizer={"type": "NFC"}))
    assert read_vocabulary(tmp_path, VOCAB_SIZE, (2,)).pre == "qwen2"


def save(folder: Path, pre: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """A tokenizer with a change of its file."""
    bpe_tokenizer(pre).save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def set_expression(content: dict[str, Any]) -> None:
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{N}{1,2}|\s+"


def set_end(content: dict[str, Any]) -> None:
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": END, "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {END: {"id": END, "ids": [2], "tokens": [END]}},
    }


@pytest.mark.parametrize(
    ("pre", "change", "why"),
    [
        ("qwen2", set_expression, "its pre_tokenizer is .* which is not known"),
        (
            "gpt-2",
            lambda content: content["pre_tokenizer"].update(add_prefix_space=True),
            "its pre_tokenizer ends with .*, and known is ByteLevel",
        ),
        (
            "gpt-2",
            lambda content: content.update(pre_tokenizer={"type": "Whitespace"}),
            "its pre_tokenizer ends with .*Whitespace",
        ),
        (
            "gpt-2",
            lambda content: content.update(normalizer={"type": "Lowercase"}),
            "its normalizer is Lowercase, and llama.cpp has none",
        ),
        (
            "llama-bpe",
            lambda content: content["model"].update(ignore_merges=False),
            "its ignore_merges is False, and llama.cpp has True for llama-bpe",
        ),
        (
            "gpt-2",
            lambda content: content["model"].update(byte_fallback=True),
            "it is BPE with byte_fallback, and known is byte-level BPE",
        ),
        (
            "gpt-2",
            lambda content: content["added_tokens"][3].update(lstrip=True),
            "its token '<tool>' has lstrip",
        ),
        ("gpt-2", set_end, "it makes .* of a text whose tokens are"),
        ("gpt-2", lambda content: content.update(decoder={"type": "Fuse"}), "its decoder is not"),
    ],
)
def test_what_llama_cpp_would_read_otherwise_is_refused(
    pre: str, change: Callable[[dict[str, Any]], Any], why: str, tmp_path: Path
) -> None:
    save(tmp_path, pre, change)
    with pytest.raises(UnwritableModelError, match=why):
        read_vocabulary(tmp_path, VOCAB_SIZE, (2,))


def test_more_stops_than_the_format_names_are_refused(tmp_path: Path) -> None:
    bpe_tokenizer("gpt-2").save_pretrained(tmp_path)
    with pytest.raises(UnwritableModelError, match="4 tokens end an answer, and GGUF names 1 to 3"):
        read_vocabulary(tmp_path, VOCAB_SIZE, (2, 3, 4, 5))


def test_a_start_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer("gpt-2", adds_start=True)
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UnwritableModelError, match="and its chat template does not"):
        read_vocabulary(tmp_path, VOCAB_SIZE, (2,))
