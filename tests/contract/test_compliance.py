"""The compliance suite against servers of another make, right ones and wrong ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.scripted_outsider import outsider
from typer.testing import CliRunner

from rolemesh.coordinator.commands.cli import app
from rolemesh.coordinator.compliance.check import CHECKS, Finding
from rolemesh.coordinator.compliance.contract import Level, Outcome
from rolemesh.coordinator.compliance.suite import SuiteInputError, checks_of, run_suite

TIMEOUT_S = 10.0
"""Generous: the machine is shared. Where a server hangs, the test says a shorter one."""

HANG_TIMEOUT_S = 0.5


async def judge(
    role: str, *faults: str, names: tuple[str, ...] = (), inline: bool = False, **options: Any
) -> dict[str, Finding]:
    async with outsider(role, *faults, inline=inline) as server:
        findings = await run_suite(
            server.address, role, {}, names=names, **{"timeout_s": TIMEOUT_S, **options}
        )
        if not {"hangs", "dies", "never_forgets_run"} & set(faults):
            assert server.run_id == "", "the suite gives back what it took"
    return {finding.check.check_id: finding for finding in findings}


def group_of(check_id: str) -> str:
    return check_id.partition(".")[0]


def broken(findings: dict[str, Finding]) -> list[str]:
    return [name for name, one in findings.items() if one.outcome is Outcome.BROKEN]


def test_ids_are_unique_and_every_check_quotes_a_contract() -> None:
    ids = [one.check_id for one in CHECKS]
    assert len(ids) == len(set(ids))
    for one in CHECKS:
        assert "." in one.check_id
        assert len(one.contract) > 20
        assert one.run.__doc__


@pytest.mark.parametrize("role", ["reward", "reference", "teacher", "critic", "rollout"])
async def test_an_outsider_that_is_right_passes_everything(role: str) -> None:
    findings = await judge(role)
    assert broken(findings) == [], [findings[name].came for name in broken(findings)]
    skipped = {name for name, one in findings.items() if one.outcome is Outcome.SKIPPED}
    assert skipped <= {"reward.reference-refused"}


async def test_an_outsider_that_samples_passes_all_of_rollout() -> None:
    findings = await judge("actor", names=("rollout", "experience", "keys", "streams", "scores"))
    assert broken(findings) == [], [findings[name].came for name in broken(findings)]


async def test_a_reward_that_serves_reward_service_alone_is_judged_by_that_alone() -> None:
    findings = await judge("reward", inline=True)
    assert broken(findings) == [], [findings[name].came for name in broken(findings)]
    skipped = {name for name, one in findings.items() if one.outcome is Outcome.SKIPPED}
    assert {name.partition(".")[0] for name in skipped} <= {"worker", "experience", "transport"} | {
        "reward"
    }
    held = {name for name, one in findings.items() if one.outcome is Outcome.HOLDS}
    assert {"reward.order", "reward.reference-refused", "keys.replay"} <= held


def test_the_example_of_a_reward_server_does_all_that_it_must() -> None:
    script = Path(__file__).parents[2] / "examples" / "reward_server.py"
    process = subprocess.Popen(
        [sys.executable, str(script), "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        done = CliRunner().invoke(app, ["compliance", url, "--timeout", f"{TIMEOUT_S}"])
    finally:
        process.kill()
        process.wait(30)
    assert done.exit_code == 0, done.output
    assert "all MUST hold" in done.output
    assert "reward.order " in done.output
    assert "skipped, the server has no WorkerService" in done.output


REWARD_FAULTS = [
    ("one_short", "reward.one-each"),
    ("nan", "reward.finite"),
    ("reversed", "reward.order"),
    ("sorted", "reward.order"),
    ("two_results", "streams.one-result-last"),
    ("progress_after_result", "streams.one-result-last"),
    ("no_result", "streams.one-result-last"),
    ("forgetful", "keys.replay"),
    ("nan_metric", "calls.metrics-finite"),
    ("judges_nothing", "reward.nothing-to-judge"),
    ("ascii_only", "reward.texts"),
    ("divides_by_length", "reward.empty-completion"),
    ("small_batches", "reward.large-batch"),
    ("unimplemented", "reward.one-each"),
    ("raises", "reward.one-each"),
    ("plain_errors", "errors.reasons"),
    ("no_reflection", "transport.reflection"),
    ("unhealthy", "transport.reward-health"),
]


# A server that pulls by reference is caught by the same checks: MESH_FAULTS are of such ones.
@pytest.mark.parametrize(("fault", "caught"), REWARD_FAULTS)
@pytest.mark.parametrize(
    "inline",
    [
        pytest.param(True, id="inline"),
        pytest.param(False, id="by reference", marks=pytest.mark.slow),
    ],
)
async def test_a_wrong_reward_is_caught(fault: str, caught: str, inline: bool) -> None:
    # Reasons are of errors that other checks have met.
    names = ("reward", caught) if caught == "errors.reasons" else (caught,)
    findings = await judge("reward", fault, inline=inline, names=names)
    assert caught in broken(findings), {name: findings[name].came for name in broken(findings)}
    finding = findings[caught]
    assert finding.sent
    assert finding.came
    assert finding.remedy


MESH_FAULTS = [
    ("lying_capabilities", "transport.claimed-services"),
    ("wrong_role", "worker.role"),
    ("no_ranks", "worker.capabilities"),
    ("no_epochs", "worker.stale-epoch"),
    ("takes_any_spec", "worker.spec-invalid"),
    ("takes_any_run", "worker.held"),
    ("never_ready", "worker.ready"),
    ("sleepless", "worker.sleep"),
    ("drained_by_anybody", "worker.drain-of-others"),
    ("never_forgets_run", "worker.drain"),
    ("never_forgets", "experience.forgotten"),
    ("giant_chunks", "experience.fetch"),
    ("shares_memory", "experience.fetch"),
    ("header_last", "experience.fetch"),
    ("sorts_rows", "experience.rows"),
    ("makes_up_experience", "experience.refusals"),
    ("keeps_released", "experience.release"),
    ("loses_a_row", "experience.reference"),
    ("ignores_shard_rows", "experience.shards"),
    ("fills_up", "experience.torn"),
    ("hides_its_peer", "experience.peer-unreachable"),
    ("doubles", "reward.column"),
]


@pytest.mark.parametrize(("fault", "caught"), MESH_FAULTS)
async def test_a_server_that_is_wrong_within_a_run_is_caught(fault: str, caught: str) -> None:
    # One check of experience waits for a second until a peer is not there.
    names = (caught if group_of(caught) == "experience" else group_of(caught),)
    findings = await judge("reward", fault, names=names)
    assert caught in broken(findings), {name: findings[name].came for name in broken(findings)}


SCORE_FAULTS = [
    ("reference", "scores_prompts", "scores.lengths"),
    ("reference", "logits", "scores.not-positive"),
    ("reference", "dropout", "scores.deterministic"),
    ("reference", "ignores_cut", "scores.lengths"),
    ("reference", "sees_padding", "scores.independent"),
    ("reference", "ignores_temperature", "scores.temperature"),
    ("reference", "any_temperature", "scores.temperature"),
    ("reference", "doubles", "scores.column"),
    ("reference", "pulls_nothing", "worker.references"),
    ("reference", "claims_less", "worker.services"),
    ("teacher", "narrow", "likeliest.columns"),
    ("teacher", "least_likely_first", "likeliest.order"),
    ("teacher", "among_themselves", "likeliest.probabilities"),
    ("teacher", "one_id", "likeliest.ids"),
    ("teacher", "ids_from_one", "likeliest.sampled"),
    ("teacher", "of_the_next", "likeliest.sampled"),
    ("teacher", "any_top_k", "likeliest.refusals"),
    ("teacher", "ignores_route", "route.rows"),
    ("teacher", "scores_all_rows", "route.rows"),
    ("teacher", "counts_from_zero", "route.rows"),
    ("teacher", "forgets_it_is_part", "route.rows"),
    ("teacher", "refuses_nothing", "route.rows"),
    ("teacher", "scales_by_weight", "route.rows"),
    ("teacher", "keeps_weight_zero", "route.weights"),
    ("teacher", "no_weights", "route.weights"),
    ("teacher", "weights_of_one", "route.weights"),
    ("teacher", "takes_unknown", "route.refusals"),
    ("critic", "late_values", "scores.causal"),
    ("critic", "off_by_one", "scores.causal"),
]


TRAINER_FAULTS = [
    ("steps_on_nothing", "trainer.no-gradient"),
    ("learns_from_looking", "trainer.no-gradient"),
    ("any_loss", "trainer.loss-invalid"),
    ("moves_early", "trainer.steps"),
    ("never_moves", "trainer.steps"),
    ("counts_double", "trainer.steps"),
    ("nan_metric", "trainer.steps"),
    ("any_version", "trainer.version"),
    ("twin_parameters", "weights.manifest"),
]


@pytest.mark.parametrize(("fault", "caught"), TRAINER_FAULTS)
async def test_a_wrong_trainer_is_caught(fault: str, caught: str) -> None:
    findings = await judge("critic", fault, names=(group_of(caught),))
    assert broken(findings) == [caught], [findings[name].came for name in broken(findings)]


@pytest.mark.parametrize(("role", "fault", "caught"), SCORE_FAULTS)
async def test_wrong_scores_are_caught(role: str, fault: str, caught: str) -> None:
    findings = await judge(role, fault, names=(caught,))
    assert caught in broken(findings), {name: findings[name].came for name in broken(findings)}


ROLLOUT_FAULTS = [
    ("as_they_finish", "rollout.rows"),
    ("unseeded", "rollout.seeds"),
    ("same_each_step", "rollout.seeds"),
    ("never_greedy", "rollout.greedy"),
    ("too_long", "rollout.lengths"),
    ("logits", "rollout.logprobs"),
    ("no_blocks", "rollout.blocks"),
    ("any_sampling", "rollout.refusals"),
    ("no_metadata", "rollout.columns"),
]


@pytest.mark.parametrize(("fault", "caught"), ROLLOUT_FAULTS)
async def test_wrong_completions_are_caught(fault: str, caught: str) -> None:
    findings = await judge("actor", fault, names=(caught,))
    assert caught in broken(findings), {name: findings[name].came for name in broken(findings)}


@pytest.mark.parametrize(
    ("fault", "caught"),
    [("samples_anyway", "rollout.no-weights"), ("old_version", "rollout.update-weights")],
)
async def test_a_rollout_service_that_is_wrong_about_weights_is_caught(
    fault: str, caught: str
) -> None:
    findings = await judge("rollout", fault, names=("rollout",))
    assert broken(findings) == [caught], [findings[name].came for name in broken(findings)]


async def test_a_server_that_hangs_ends_in_findings() -> None:
    names = ("reward.one-each", "reward.finite")
    findings = await judge("reward", "hangs", names=names, inline=True, timeout_s=HANG_TIMEOUT_S)
    assert broken(findings) == list(names)
    assert "DEADLINE_EXCEEDED" in findings["reward.one-each"].came


async def test_a_stream_without_end_is_not_followed_without_end() -> None:
    findings = await judge("reward", "floods", names=("streams.one-result-last",), inline=True)
    assert "more than" in findings["streams.one-result-last"].came


async def test_a_call_without_a_deadline_may_not_wait_for_ever() -> None:
    names = ("transport.no-deadline",)
    findings = await judge("reward", "waits_for_ever", names=names, timeout_s=HANG_TIMEOUT_S)
    assert broken(findings) == list(names)


async def test_a_server_that_dies_ends_in_findings_and_the_rest_is_not_run() -> None:
    findings = await judge("reward", "dies", inline=True, timeout_s=HANG_TIMEOUT_S)
    outcomes = [one.outcome for one in findings.values()]
    assert Outcome.BROKEN in outcomes
    assert outcomes.count(Outcome.NOT_RUN) > 5
    assert any(one.is_failure for one in findings.values())


async def test_a_server_that_a_run_holds_is_left_alone() -> None:
    async with outsider("reward") as server:
        server.run_id = "somebody"
        with pytest.raises(SuiteInputError, match="run 'somebody' holds the server"):
            await run_suite(server.address, "reward", {}, timeout_s=TIMEOUT_S)
        assert server.run_id == "somebody"


async def test_only_the_checks_asked_for_run_and_what_they_need() -> None:
    findings = await judge("reward", names=("reward.order", "transport"))
    assert "worker.initialize" in findings
    groups = {name.partition(".")[0] for name in findings} - {"worker"}
    assert groups == {"reward", "transport"}
    assert "reward.finite" not in findings
    with pytest.raises(SuiteInputError, match="no check and no group of reward"):
        checks_of("reward", ["scores"])


def test_bad_input_is_told_with_exit_code_2() -> None:
    runner = CliRunner()
    for arguments, told in (
        (["compliance", "--role", "judge", "x:1"], "--role is 'judge'"),
        (["compliance"], "URL is missing"),
        (["compliance", "nowhere"], "address is 'nowhere'"),
        (["compliance", "127.0.0.1:1", "--timeout", "0.2"], "no server answers"),
        (["compliance", "127.0.0.1:1", "--spec", "/no/such.yaml"], "cannot be read"),
    ):
        done = runner.invoke(app, arguments)
        assert done.exit_code == 2, done.output
        assert told in done.output
    listed = runner.invoke(app, ["compliance", "--list", "--role", "critic"])
    assert listed.exit_code == 0
    assert "scores.causal" in listed.output
    assert "reward.order" not in listed.output


async def test_findings_say_what_people_and_programs_need() -> None:
    findings = await judge("reward", "nan", inline=True, names=("reward.finite",))
    told = json.loads(json.dumps(findings["reward.finite"].to_dict()))
    assert told["level"] == Level.MUST
    assert told["outcome"] == "broken"
    assert "row 2" in told["came"]
    assert told["contract"] == "Every reward must be finite."
    assert told["remedy"]
