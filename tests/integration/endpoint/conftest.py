"""One engine for all files of the folder: loading vLLM takes many seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.endpoints import Sampler, Served, serving_endpoint, write_model


@pytest.fixture(scope="package")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    made = Sampler(write_model(tmp_path_factory.mktemp("endpoint") / "model"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(sampler: Sampler) -> Iterator[Served]:
    """An endpoint with tools and without a key."""
    with serving_endpoint(sampler, tool_parser="hermes") as endpoint:
        yield endpoint
