"""What compression would save of what crosses hosts, and what it would cost on one core.

    python tests/benchmarks/compression.py [--megabytes 8]

Tokens are the pages of docs/ in the quickstart's tokenizer, weights its embedding. Each is packed
and unpacked by zlib's quickest level; tokens also by int32 in place of int64. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

MODEL = Path(".models/SmolLM2-135M-Instruct")


def compression(megabytes: int) -> dict[str, Any]:
    """How much smaller columns and weights become, and the rate of one core at each end."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    text = "".join(page.read_text() for page in sorted(Path("docs").glob("*.md")))
    ids = torch.tensor(tokenizer.encode(text).ids)
    tokens = ids.repeat(1 + (megabytes << 20) // ids.nbytes)
    with safe_open(MODEL / "model.safetensors", "pt") as opened:
        embedding = opened.get_tensor("model.embed_tokens.weight")
    found: dict[str, Any] = {}
    for name, values in (
        ("tokens_int64", tokens),
        ("logprobs_float32", torch.randn(len(tokens))),
        ("weights_bfloat16", embedding.bfloat16()),
    ):
        content = memoryview(values.contiguous().view(-1).view(torch.uint8).numpy().data)
        content = content[: megabytes << 20]
        started = time.perf_counter()
        packed = zlib.compress(content, 1)
        there = time.perf_counter()
        assert zlib.decompress(packed) == content
        back = time.perf_counter()
        found[f"{name}_zlib"] = summary(content, len(packed), there - started, back - there)
    started = time.perf_counter()
    narrow = tokens.int()
    there = time.perf_counter()
    assert torch.equal(narrow.long(), tokens)
    back = time.perf_counter()
    found["tokens_as_int32"] = summary(
        tokens.numpy().data.cast("B"), narrow.nbytes, there - started, back - there
    )
    return found


def summary(
    content: memoryview, packed_bytes: int, there_s: float, back_s: float
) -> dict[str, Any]:
    """Size after packing, as a share, and the rates."""
    return {
        "size_share": round(packed_bytes / len(content), 3),
        "pack_mb_per_s": round(len(content) / there_s / 1e6),
        "unpack_mb_per_s": round(len(content) / back_s / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=8)
    arguments = parser.parse_args()
    line = {
        "benchmark": "compression",
        "config": vars(arguments),
        "versions": {"python": platform.python_version(), "zlib": zlib.ZLIB_RUNTIME_VERSION},
        **compression(arguments.megabytes),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
