"""Two steps of every algorithm over fake roles: what is asked, of whom, in which order."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import pytest
from support.algorithm_cases import CASES
from support.fake_core import FakeCore
from support.fake_in_process import InProcessRun, made, run_jumping
from support.fake_recipes import split_pools
from support.slow_cases import mostly_slow

from rolemesh.coordinator.algorithms.registry import ALGORITHMS
from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.recipe.algorithm.policy_gradients import POLICY_GRADIENTS


def columns_of(request: Any) -> set[str]:
    return {column.name for group in request.experience.groups for column in group.columns}


def test_every_algorithm_is_run_here() -> None:
    assert {name.partition(" ")[0] for name in CASES} == set(ALGORITHMS)


# All members of a family ask the same: one of each is placed in each way, and with a reference.
PLAIN = {"grpo", "grpo with reference", "dr_grpo", "pass_at_k"}
OF_FAMILY = {name for name in CASES if name.partition(" ")[0] in POLICY_GRADIENTS} - PLAIN


def cases(*, left_out: Container[str]) -> list[Any]:
    fast = [number for number, name in enumerate(CASES) if name not in left_out]
    return mostly_slow(fast, [(name,) for name in CASES])


@pytest.mark.parametrize(
    "name", cases(left_out={name for name in OF_FAMILY if name.endswith(" with reference")})
)
def test_two_steps_ask_what_the_page_says(name: str) -> None:
    case = CASES[name]
    run = made(case.recipe())
    mesh = run.mesh
    assert run.loop.step == 2
    for step in (1, 2):
        asked = [
            m for m in mesh.methods(step) if m.partition(".")[2] not in ("SaveCheckpoint", "Export")
        ]
        assert asked == list(case.order)
    for call in mesh.calls:
        if call.name in case.reads:
            assert case.reads[call.name] <= columns_of(call.request), call.name
    updates = [call for call in mesh.calls if call.method == "Update"]
    requests: list[Any] = [call.request for call in updates]
    assert {request.rows_per_unit for request in requests} == {case.rows_per_unit}
    assert {(request.epochs, request.mini_batch_rows) for request in requests} == {(1, 4)}
    # The third prompt of the data is the first of the second step, for whatever is read.
    starts = [
        (getattr(c.request, "prompts", None) or c.request.rows).start  # type: ignore[attr-defined]
        for c in mesh.calls
        if c.method in ("Generate", "ReadBatch")
    ]
    half = len(starts) // 2
    assert (set(starts[:half]), set(starts[half:])) == ({0}, {3})
    assert set(mesh.roles) == set(case.roles)


@pytest.mark.parametrize(
    "name",
    cases(left_out=OF_FAMILY - {"gdpo", "grpo with a cap", "grpo with other parts"}),
)
def test_the_placement_changes_no_call(name: str) -> None:
    case = CASES[name]

    def asked(recipe: Any) -> list[Any]:
        run = made(recipe)
        return sorted(
            (call.name, call.key[2:], getattr(call.request, "experience", None) and rows(call))
            for call in run.mesh.calls
        )

    def rows(call: Any) -> list[tuple[str, int, int]]:
        return [
            (shard.experience_id, shard.row_start, shard.num_rows)
            for group in call.request.experience.groups
            for shard in group.shards
        ]

    def strip(calls: list[Any]) -> list[Any]:
        return [call for call in calls if not call[0].endswith("SaveCheckpoint")]

    shared = strip(asked(case.recipe()))
    assert strip(asked(case.recipe(pools=split_pools(case.roles)))) == shared
    if "sampling" in case.section and case.section["type"] != "dapo":
        blocks = {"type": "sync", "block_rows": max(2, case.rows_per_unit)}
        together = strip(asked(case.recipe(sampler=blocks)))
        apart = strip(asked(case.recipe(sampler=blocks, pools=split_pools(case.roles))))
        assert together == apart
        assert len(together) > len(shared)


EVALUATED = ("sft", "dpo", "kto", "reward_model")


@pytest.mark.parametrize("name", EVALUATED)
def test_held_out_rows_go_through_the_step_that_trains_without_an_update(name: str) -> None:
    case = CASES[name]
    plain = made(case.recipe())
    run = made(case.recipe(evaluation={"num_prompts": 5, "every_steps": 1}))
    (trained,) = {call.role for call in run.mesh.calls if call.method == "Update"}
    order = [
        f"{trained}.ForwardBackward" if method.endswith(".Update") else method
        for method in case.order
    ]
    for step in (0, 1, 2):
        calls = [
            call
            for call in run.mesh.calls
            if call.step == step and call.key[3].startswith("evaluate.")
        ]
        assert [call.name for call in calls] == order
        read, *_, loss = (call.request for call in calls)
        assert (read.rows.split, read.rows.start, read.rows.count) == (2, 0, 5)  # type: ignore[attr-defined]
        assert loss.rows_per_unit == case.rows_per_unit  # type: ignore[attr-defined]
        assert loss.experience.num_rows == 5 * case.rows_per_unit  # type: ignore[attr-defined]
        assert case.reads[f"{trained}.Update"] <= columns_of(loss)
    # Training is what it was: the same rows, the same weights.
    assert run.mesh.roles[trained].weight == plain.mesh.roles[trained].weight

    def trained_on(mesh: Any) -> list[Any]:
        updates = mesh.of(f"{trained}.Update")
        return [mesh.values(call.request.experience, "prompt_ids") for call in updates]

    assert trained_on(run.mesh) == trained_on(plain.mesh)
    # The fake's loss is 1 less its weight: before the first step its weight is 0.
    before, after = run.loop.progress.before, run.loop.progress.after
    assert before is not None
    assert after is not None
    # What its estimator reports besides.
    others = {"held_out/kl/mean": 0.25} if name == "kto" else {}
    assert before.scalars() == {
        "held_out/loss": 1.0, "held_out/preference_accuracy": 0.5, **others,
    }  # fmt: skip
    assert after.metrics["loss"] == 1.0 - run.mesh.roles[trained].weight != 1.0


@pytest.mark.parametrize(
    "run", [{"prompts_per_step": 1}, {"evaluation": {"num_prompts": 1}}], ids=str
)
def test_kto_needs_two_rows_together(run: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"run\.\w.* is 1, but algorithm 'kto' needs 2 rows"):
        CASES["kto"].recipe(**run)
    CASES["dpo"].recipe(**run)
    CASES["kto"].recipe(evaluation={"num_prompts": 0})


def test_an_evaluation_without_a_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    report = FakeCore.report
    monkeypatch.setattr(FakeCore, "report", lambda fake, rows, **metrics: report(fake, rows))
    with pytest.raises(RunError, match="reports nothing, but not the loss: ForwardBackward must"):
        made(CASES["sft"].recipe(evaluation={"num_prompts": 2}))


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_services_are_asked_for_the_parts_that_a_recipe_puts_in_the_place_of_the_papers(
    name: str,
) -> None:
    algorithm = {"advantages": {"type": "rloo"}, "policy_loss": {"type": "cispo", "clip_high": 5.0}}
    mesh = made(CASES[name].recipe(algorithm=algorithm)).mesh
    estimate: Any = mesh.of("actor.ComputeAdvantages")[0].request
    update: Any = mesh.of("actor.Update")[0].request
    assert (estimate.estimator.type, update.loss.type) == ("rloo", "cispo")
    assert update.loss.parameters["clip_high"] == 5.0


def test_a_step_that_cannot_be_made_is_named_by_its_type() -> None:
    wants_kl = {"policy_loss": {"kl_in_loss": 0.1}}
    with pytest.raises(RunError, match=r"algorithm 'gspo' cannot be run: .*no section reference"):
        made(CASES["gspo"].recipe(algorithm=wants_kl))


def test_a_mini_batch_that_cuts_groups_keeps_no_units() -> None:
    run = made(CASES["grpo"].recipe(algorithm={"mini_batch_rows": 3}))
    requests: list[Any] = [call.request for call in run.mesh.of("actor.Update")]
    assert {request.rows_per_unit for request in requests} == {1}


def test_remax_compares_with_one_greedy_completion_a_prompt() -> None:
    run = made(CASES["remax"].recipe())
    first, greedy = (call.request for call in run.mesh.of("actor.Generate")[:2])
    assert (first.sampling.greedy, first.sampling.samples_per_prompt) == (False, 2)  # type: ignore[attr-defined]
    assert (greedy.sampling.greedy, greedy.sampling.samples_per_prompt) == (True, 1)  # type: ignore[attr-defined]
    estimate: Any = run.mesh.of("actor.ComputeAdvantages")[0].request
    assert (estimate.experience.num_rows, estimate.baseline.num_rows) == (6, 3)
    assert run.mesh.values(estimate.baseline, "prompt_ids") == [0, 1, 2]
    assert len(run.mesh.values(estimate.baseline, "rewards")) == 3


def test_texts_are_a_loss_beside_the_policys_and_only_where_they_weigh() -> None:
    plain: Any = made(CASES["safe_rlhf"].recipe()).mesh.of("actor.Update")[0].request
    assert len(plain.auxiliary) == 0
    mesh = made(CASES["safe_rlhf with texts"].recipe()).mesh
    read: Any = mesh.of("actor.ReadBatch")[0].request
    assert (read.rows.split, read.rows.count, read.kind) == (3, 3, 1)  # SPLIT_PRETRAINING
    update: Any = mesh.of("actor.Update")[0].request
    (texts,) = update.auxiliary
    assert (texts.weight, texts.loss.type, texts.experience.num_rows) == (0.5, "sft", 3)
    assert update.experience.num_rows == 6


def test_the_reference_gets_the_temperature_of_the_loss() -> None:
    tempered = {"sampling": {"temperature": 0.5}, "policy_loss": {"temperature": 0.5}}
    request: Any = (
        made(CASES["ppo"].recipe(algorithm=tempered))
        .mesh.of("reference.ComputeLogprobs")[0]
        .request
    )
    assert (request.column, request.temperature) == ("reference_logprobs", 0.5)


@pytest.mark.parametrize("name", ["dpo", "kto", "reward_model"])
def test_rows_that_come_in_twos_are_read_in_twos(name: str) -> None:
    mesh = made(CASES[name].recipe()).mesh
    (role,) = {call.role for call in mesh.calls if call.method == "ReadBatch"}
    read: Any = mesh.of(f"{role}.ReadBatch")[0].request
    assert read.kind == (3 if name == "kto" else 2)  # JUDGEMENT, PREFERENCE
    update: Any = mesh.of(f"{role}.Update")[0].request
    assert update.experience.num_rows == 6


@pytest.mark.parametrize(
    ("name", "changes", "fakes", "position"),
    [
        ("grpo", {}, {}, 6),
        ("dapo", {}, {"is_wanted": lambda prompt: prompt % 2 == 1}, 12),
        ("sft", {}, {}, 6),
    ],
    ids=["sync", "dynamic sampling", "given data"],
)  # fmt: skip
def test_a_checkpoint_names_the_first_prompt_that_was_not_used(
    name: str, changes: dict[str, Any], fakes: dict[str, Any], position: int, tmp_path: Path
) -> None:
    async def work() -> None:
        await InProcessRun(CASES[name].recipe(**changes), tmp_path, **fakes).execute()

    run_jumping(work())
    marker = (tmp_path / "checkpoints/step-00000002/COMMITTED").read_text()
    assert f'"next_prompt": {position}' in marker
