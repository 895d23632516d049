"""One endpoint for all tests of clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.served_policy import ServedPolicy, served

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / ".models" / "SmolLM2-135M-Instruct"
TEMPLATE = Path(__file__).with_name("chatml_with_tools.jinja")

MAX_MODEL_LEN = 2048


@pytest.fixture(scope="session")
def policy() -> Iterator[ServedPolicy]:
    """SmolLM2, with a template that shows tools."""
    if not MODEL.exists():
        pytest.skip(f"{MODEL} is not there: run `make model`")
    with served(
        MODEL,
        rollout={"max_model_len": MAX_MODEL_LEN},
        endpoint={"chat_template": str(TEMPLATE), "tool_parser": "hermes"},
    ) as policy:
        yield policy
