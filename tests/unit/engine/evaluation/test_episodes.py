"""Tests of what an episode needs to know before it is played."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_models import tiny_tokenizer

from rolemesh.engine.evaluation.episodes import EpisodePlayer
from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.engine.specs.evaluation import AskedSpec, DrawingSpec, EvaluatedTaskSpec


def test_an_endpoint_that_names_no_longest_sequence_leaves_it_to_the_task() -> None:
    task = EvaluatedTaskSpec.model_validate(
        {
            "name": "mine",
            "data": {"type": "jsonl", "path": "a"},
            "environment": {"type": "calculator"},
            "reward": {"type": "environment"},
        }
    )
    with pytest.raises(ValueError, match=r"task mine: max_model_len .* give it in the task"):
        EpisodePlayer(
            task,
            AskedSpec(url="http://127.0.0.1:9/v1", tokenizer=Path("policy")),
            DrawingSpec(),
            model="m",
            max_model_len=None,
            tokenizer=tiny_tokenizer(),
            sandbox=find_sandbox("auto"),
        )
