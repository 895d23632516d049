"""Outcomes of calls, as handles of roles read them from result messages."""

from __future__ import annotations

from typing import Any

import pytest

from rolemesh.coordinator.dataflow.calls.role_calls import outcome_of
from rolemesh.v1 import experience_pb2, trainer_pb2


def test_a_result_without_experience_has_no_rows() -> None:
    # An Outcome without experience would pass as one that has nothing to join.
    outcome = outcome_of(experience_pb2.ExperienceResult())
    assert outcome.experience is not None
    assert outcome.experience.num_rows == 0


def test_a_selection_of_no_group_is_none() -> None:
    assert outcome_of(trainer_pb2.SelectGroupsResult()).experience is None
    chosen = experience_pb2.ExperienceRef(num_rows=4)
    assert outcome_of(trainer_pb2.SelectGroupsResult(experience=chosen)).experience == chosen


@pytest.mark.parametrize("version", [0, 7])
def test_an_update_tells_its_version_and_no_experience(version: int) -> None:
    outcome = outcome_of(trainer_pb2.UpdateResult(policy_version=version))
    assert (outcome.policy_version, outcome.experience) == (version, None)
    assert outcome.expert_loads == {}


@pytest.mark.parametrize("kind", [trainer_pb2.UpdateResult, trainer_pb2.OptimStepResponse])
def test_loads_of_experts_are_checked_where_they_arrive(kind: Any) -> None:
    layer = experience_pb2.LayerLoads(layer=1, choices=[3, 4])
    assert outcome_of(kind(expert_loads=[layer])).expert_loads == {1: [3, 4]}
    layer.choices[0] = -3
    with pytest.raises(ValueError, match="choices holds -3"):
        outcome_of(kind(expert_loads=[layer]))
