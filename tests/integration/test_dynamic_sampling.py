"""Dynamic sampling over fake roles: rounds until there are enough groups, and no more than that."""

from __future__ import annotations

from typing import Any

import pytest
from support.algorithm_cases import CASES
from support.fake_in_process import InProcessRun, made

from rolemesh.coordinator.dataflow.errors import RunError


def dapo_run(is_wanted: Any, **changes: Any) -> InProcessRun:
    return made(CASES["dapo"].recipe(**changes), is_wanted=is_wanted)


def test_dynamic_sampling_goes_on_until_there_are_enough_groups() -> None:
    run = dapo_run(lambda prompt: prompt % 2 == 1, steps=2)
    mesh = run.mesh
    requests: list[Any] = [call.request for call in mesh.of("actor.Generate")]
    starts = [
        (call.step, r.prompts.start)
        for call, r in zip(mesh.of("actor.Generate"), requests, strict=True)
    ]
    # Of 0 1 2 | 3 4 5 | those wanted are 1, 3 and 5; the next step begins behind them.
    assert starts == [(1, 0), (1, 3), (2, 6), (2, 9)]
    selects: list[Any] = [call.request for call in mesh.of("actor.SelectGroups")]
    assert [select.max_groups for select in selects] == [3, 2, 3, 2]
    assert {select.rule.type for select in selects} == {"reward_spread"}
    updates: list[Any] = [call.request for call in mesh.of("actor.Update")]
    trained = [mesh.values(update.experience, "prompt_ids") for update in updates]
    assert trained == [[1, 1, 3, 3, 5, 5], [7, 7, 9, 9, 11, 11]]


def test_no_more_groups_are_kept_than_are_missing() -> None:
    # The first round gives one of three, the second has three of which two are missing.
    mesh = dapo_run(lambda prompt: prompt in (2, 3, 4, 5), steps=1).mesh
    update: Any = mesh.of("actor.Update")[0].request
    assert mesh.values(update.experience, "prompt_ids") == [2, 2, 3, 3, 4, 4]


def test_a_round_without_any_group_is_passed_over() -> None:
    mesh = dapo_run(lambda prompt: prompt >= 6, steps=1).mesh
    update: Any = mesh.of("actor.Update")[0].request
    assert mesh.values(update.experience, "prompt_ids") == [6, 6, 7, 7, 8, 8]


def test_too_few_groups_after_all_rounds_end_the_run() -> None:
    with pytest.raises(RunError) as failed:
        dapo_run(lambda prompt: prompt == 4, algorithm={"max_rounds": 3})
    assert str(failed.value) == (
        "step 1: 3 rounds of 3 prompts gave 1 groups that algorithm.selection wants, not 3: raise "
        "algorithm.max_rounds, or give prompts that the policy answers sometimes right and "
        "sometimes wrong"
    )
