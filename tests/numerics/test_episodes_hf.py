"""Episodes on the hf back end with a tiny random model, against full forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.episode_checks import (
    assert_episodes_score_as_a_full_forward,
    assert_requests_may_come_later,
    assert_turns_end_when_told,
)
from support.rollout_checks import load_trainer_model, set_stop_tokens
from support.tiny_models import write_tiny_llama
from transformers import PreTrainedModel

from rolemesh.engine.rollout.hf.sampler import HfBackend
from rolemesh.engine.specs import HfSpec

FLOAT32_LOGPROB = 2e-5
"""Log-probs near -6 in float32, summed in another order over 2 layers: a few of its 5e-7 steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_llama(tmp_path_factory.mktemp("hf") / "model")
    set_stop_tokens(path, (2, 300, 301))
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load_trainer_model(folder)


@pytest.fixture
def backend(folder: Path, model: PreTrainedModel) -> Iterator[HfBackend]:
    backend = HfBackend(HfSpec(max_model_len=64, max_num_seqs=5), folder)
    backend.update_weights(model.named_parameters(), 3)
    yield backend
    backend.close()


def test_requests_may_come_while_others_are_sampled(backend: HfBackend) -> None:
    assert_requests_may_come_later(backend, FLOAT32_LOGPROB)


def test_a_turn_ends_where_the_caller_says(backend: HfBackend) -> None:
    assert_turns_end_when_told(backend)


def test_sampled_tokens_score_as_in_a_full_forward_with_tool_output_between(
    backend: HfBackend, model: PreTrainedModel, tmp_path: Path
) -> None:
    assert_episodes_score_as_a_full_forward(backend, model, tmp_path, FLOAT32_LOGPROB)
