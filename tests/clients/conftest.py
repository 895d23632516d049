"""One endpoint for all tests of clients, and a folder for programs with Tinker's SDK."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cookbook import MODEL, NAME
from support.served_policy import ServedPolicy, served

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


@pytest.fixture
def beside_a_tokenizer(tmp_path: Path) -> Path:
    """A folder to run in, where the SDK finds the base's tokenizer by the base's name."""
    link = tmp_path / NAME
    link.parent.mkdir()
    link.symlink_to(MODEL)
    return tmp_path
