"""How many tokens a text can have at most, told from its bytes without encoding it.

Only for tokenizers of which this can be proven: each token stands for at least one byte of what
their normalizer makes of a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_NFC_GROWTH = 3
"""NFC makes at most three bytes of one (Unicode Standard Annex 15, section 9); ASCII stays."""


def most_tokens(tokenizer: Any) -> Callable[[str], int] | None:
    """A function that bounds the tokens of a text from above; None where nothing is proven.

    Proven are BPE models over the bytes of a text (GPT-2, Llama 3, Qwen, SmolLM) whose normalizer
    does nothing but NFC. Their pre-tokenizers cut a text and write a byte as a character; a token
    is one character of that at least, and so is one that was added. Those of SentencePiece set a
    space of three bytes in front of each text, and may write a character as several tokens.

    Args:
        tokenizer: A tokenizer of the transformers library, or anything else, which is not proven.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    model = getattr(backend, "model", None)
    if model is None or type(model).__name__ != "BPE" or model.byte_fallback:
        return None
    pieces = _parts(backend.pre_tokenizer, "pretokenizers")
    if not any(_writes_bytes(piece) for piece in pieces) or not all(
        _writes_bytes(piece) or piece["type"] in ("Split", "Digits") for piece in pieces
    ):
        return None
    normalizers = _parts(backend.normalizer, "normalizers")
    if not normalizers:
        return _bytes
    return _bytes_in_nfc if all(one["type"] == "NFC" for one in normalizers) else None


def _parts(component: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, as tokenizer.json has them."""
    if component is None:
        return []
    step = json.loads(component.__getstate__())
    steps: list[dict[str, Any]] = step[key] if step["type"] == "Sequence" else [step]
    return steps


def _writes_bytes(step: dict[str, Any]) -> bool:
    return step["type"] == "ByteLevel" and not step["add_prefix_space"]


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _bytes_in_nfc(text: str) -> int:
    return len(text) if text.isascii() else _NFC_GROWTH * len(text.encode())
