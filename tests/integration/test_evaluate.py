"""`rolemesh evaluate` against endpoints whose answers are known, and against served policies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from support import warm_processes
from support.episode_checks import OWN
from support.evaluations import evaluated, rolemesh, rows_beside
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.sum_server import sum_server
from support.tiny_models import write_tiny_classifier

from rolemesh.coordinator.api.doors.coordinator_service import serve_coordinator
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.run.folders.evaluations import read_evaluation
from rolemesh.coordinator.run.folders.ownership import COORDINATOR_FILE
from rolemesh.coordinator.run.saving.resume import CONFIG_FILE
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.store import RunRecord, RunState
from rolemesh.engine.model_folders.pretrained import load_tokenizer

RUN_S = 240
ROUNDING = 1e-5
"""Logits of another batch of requests, each of about 1; a text with another letter is off by 0.01.
"""
SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
# A question with its two numbers alone, and an answer that is right if it is their sum.
SUMS = {
    "task": "basic_arithmetic",
    "size": 40,
    "config": {**SUM, "operators": ["+"], "allow_parentheses": False, "allow_negation": False},
    "question_template": "{expression}",
}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump({"sums": SUMS}))
    return path


def test_scores_of_known_answers_are_the_known_scores(tmp_path: Path, suite: Path) -> None:
    # Right where the first number is even, which is known without the server.
    with sum_server(lambda terms, _: str(sum(terms)) if terms[0] % 2 == 0 else "x") as (url, seen):
        code, (told,) = evaluated(tmp_path, "--url", url, "--tasks", str(suite))
    assert code == 0
    even = sum(int(body["messages"][-1]["content"].split()[0]) % 2 == 0 for body in seen)
    assert 0 < even < 40
    score = told["tasks"]["sums"]["score"]
    assert score["mean"] == pytest.approx(even / 40)
    share = even / 40
    assert score["standard_error"] == pytest.approx(math.sqrt(share * (1 - share) / 39))
    file = tmp_path / told["file"]
    assert read_evaluation(file).tasks["sums"].num_prompts == 40
    rows = rows_beside(file)
    assert len(rows) == 40
    assert {"prompt", "completion", "score", "answer"} <= rows[0].keys()


def test_pass_at_k_of_known_answers_and_equal_seeds_for_equal_draws(
    tmp_path: Path, suite: Path
) -> None:
    # One of the four completions of a prompt is right: the one with the lowest seed.
    lowest: dict[str, int] = {}

    def answer(terms: list[int], body: dict[str, Any]) -> str:
        return str(sum(terms)) if body["seed"] == lowest.get(str(terms)) else "x"

    drawn = ("--tasks", str(suite), "--samples", "4", "--seed", "7")
    with sum_server(answer) as (url, seen):
        evaluated(tmp_path, "--url", url, *drawn)
        for body in seen:
            terms = [int(one) for one in body["messages"][-1]["content"].split(" + ")]
            lowest[str(terms)] = min(lowest.get(str(terms), 2**31), body["seed"])
        first = sorted(body["seed"] for body in seen)
        seen.clear()
        code, (told,) = evaluated(tmp_path, "--url", url, *drawn, "--pass-at", "1,2,4")
        assert sorted(body["seed"] for body in seen) == first
    assert code == 0
    passing = told["tasks"]["sums"]["pass_at"]
    assert [passing[k]["mean"] for k in "124"] == pytest.approx([0.25, 0.5, 1.0])


def test_rows_without_an_answer_are_counted_and_named_and_no_zero(
    tmp_path: Path, suite: Path
) -> None:
    with sum_server(lambda terms, _: str(sum(terms)) if terms[0] > 9 else None) as (url, seen):
        done = rolemesh(tmp_path, "evaluate", "--url", url, "--tasks", str(suite))
    assert done.returncode == 3, done.stderr
    refused = sum(int(body["messages"][-1]["content"].split()[0]) <= 9 for body in seen)
    assert 0 < refused < 40
    assert f"{refused} of 40" in done.stdout
    assert "1.000 ± 0.000" in done.stdout
    assert "status 400: this server knows no such sum" in done.stdout


def test_two_evaluations_differ_with_a_paired_error(tmp_path: Path, suite: Path) -> None:
    files = []
    for rule in (lambda terms: terms[0] % 2, lambda terms: terms[0] % 2 or terms[1] % 2):
        with sum_server(lambda terms, _, rule=rule: str(sum(terms) + 5 * (not rule(terms)))) as (
            url,
            _,
        ):
            _, (told,) = evaluated(tmp_path, "--url", url, "--tasks", str(suite))
        files.append(told["file"])
    code, (found,) = evaluated(tmp_path, *files)
    assert code == 0
    one, other = (read_evaluation(tmp_path / file).tasks["sums"] for file in files)
    changed = [other.by_prompt()[key] - score for key, score in one.by_prompt().items()]
    # None has become worse.
    assert min(changed) >= 0
    difference = found["difference"]
    assert difference["mean"] == pytest.approx(sum(changed) / 40)
    assert difference["num_prompts"] == 40
    assert difference["low"] > 0
    assert difference["p_value"] < 0.05


def test_a_key_is_sent_and_its_lack_told(tmp_path: Path, suite: Path) -> None:
    with sum_server(lambda terms, _: str(sum(terms)), key="mine") as (url, _):
        asked = ("evaluate", "--url", url, "--tasks", str(suite))
        without = rolemesh(tmp_path, *asked)
        unset = rolemesh(tmp_path, *asked, "--key-variable", "SUMS_KEY")
        given = rolemesh(tmp_path, *asked, "--key-variable", "SUMS_KEY", SUMS_KEY="mine")
    assert without.returncode == 1
    assert "status 401: give --key-variable" in without.stderr
    assert unset.returncode == 2
    assert "SUMS_KEY is not set" in unset.stderr
    assert given.returncode == 0, given.stderr
    assert "1.000" in given.stdout


async def test_a_run_that_goes_on_is_asked_where_it_answers(tmp_path: Path, suite: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    recipe = tiny_recipe(tiny_model(tmp_path / "model"))
    tokenizer = load_tokenizer(tmp_path / "model")
    (run / CONFIG_FILE).write_text(yaml.safe_dump(recipe))
    store = MemoryStateStore()
    record = RunRecord(
        run_id="r", name="n", num_steps=9, directory=str(run), created_at=1.0, updated_at=1.0,
        state=RunState.RUNNING,
    )  # fmt: skip
    await store.create_run(record)
    server, port = await serve_coordinator(StoreOperations(store))
    facts = {"address": f"127.0.0.1:{port}", "pid": os.getpid(), "run_id": "r"}
    (run / COORDINATOR_FILE).write_text(json.dumps(facts))
    asked = ("evaluate", str(run), "--live", "--tasks", str(suite))
    try:
        nowhere = await asyncio.to_thread(rolemesh, tmp_path, *asked)
        # As in a run, prompts are rendered by the run's own tokenizer, and sent as token ids.
        server_of_sums = sum_server(lambda terms, _: str(sum(terms)), "mine", tokenizer.decode)
        with server_of_sums as (url, _):
            services = {"actor": {"role": "actor", "address": "a:1", "endpoint": url}}
            await store.update_run("r", services=services)
            without = await asyncio.to_thread(rolemesh, tmp_path, *asked)
            keyed = (*asked, "--key-variable", "SUMS_KEY")
            given = await asyncio.to_thread(rolemesh, tmp_path, *keyed, SUMS_KEY="mine")
    finally:
        await server.stop(None)
    assert nowhere.returncode == 2
    assert "has no endpoint" in nowhere.stderr
    assert without.returncode == 1
    assert "status 401: give --key-variable" in without.stderr
    assert given.returncode == 0, given.stderr
    assert f"answers at {url}" in given.stdout
    (written,) = (run / "evaluations").glob("step-*.json")
    assert json.loads(written.read_text())["url"] == url


def test_an_endpoint_that_is_not_there_and_a_task_that_is_not_are_told(tmp_path: Path) -> None:
    gone = rolemesh(tmp_path, "evaluate", "--url", "http://127.0.0.1:9/v1", "--tasks", "gcd")
    assert gone.returncode == 1
    assert "http://127.0.0.1:9/v1 does not answer" in gone.stderr
    unknown = rolemesh(tmp_path, "evaluate", "--url", "http://127.0.0.1:9/v1", "--tasks", "gdc")
    assert unknown.returncode == 2
    assert "which reasoning-gym does not have" in unknown.stderr
    assert not list(tmp_path.glob("evaluations/*"))
    assert not list(tmp_path.glob("evaluations/.*"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "POLICY is missing"),
        (("--url", "x", "a", "b"), "name one run at most"),
        (("a", "--live", "--url", "http://127.0.0.1:9"), "--live asks one run"),
        (("a", "b", "--live"), "--live asks one run"),
        (("nowhere", "--live"), "is neither a folder nor the id of a run"),
        (("a", "--samples", "2", "--pass-at", "4"), "draw as many at least"),
        (("--url", "nothing", "--tasks", "gcd"), "--url is"),
        (
            ("--url", "http://127.0.0.1:9", "--samples", "2", "--temperature", "0", "--tasks", "x"),
            "makes all of a prompt's completions the same",
        ),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    done = rolemesh(tmp_path, "evaluate", *arguments)
    assert done.returncode == 2
    assert told in done.stderr


def rewards(folder: Path, source: str) -> list[dict[str, Any]]:
    """A source with a classifier, which reads every letter of a random model's texts."""
    judge = write_tiny_classifier(folder / "judge", seed=4)
    classifier = {"type": "classifier", "model": {"path": str(judge), "compute_dtype": "float32"}}
    return [{"source": {"type": source}}, {"source": classifier, "weight": 0.5}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a tiny model that has ended, with its checkpoint."""
    folder = tmp_path_factory.mktemp("work")
    recipe = tiny_recipe(
        tiny_model(folder / "base"),
        reward__source=rewards(folder, "arithmetic"),
        algorithm__sampling__max_new_tokens=24,
    )
    made = CliRun(recipe, folder)
    with contextlib.closing(made):
        assert made.wait(RUN_S) == 0, made.output
        return made.out


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """`rolemesh serve-policy`, or what stands in front of it, and what it tells."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rolemesh", "serve-policy", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **warm_processes.everything(), **warm_processes.with_vllm()},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, process.communicate()
        yield process, json.loads(line)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def child_of(process: subprocess.Popen[str]) -> psutil.Process:
    """What answers, not what stands in front of it."""
    (front,) = psutil.Process(warm_processes.forked(process.pid)).children()
    child = psutil.Process(warm_processes.forked(front.pid))
    assert child.pid != front.pid
    return child


def test_a_checkpoint_is_served_until_the_command_ends(run: Path) -> None:
    with serving(str(run)) as (process, told):
        assert told["policy"] == f"{run}, step 2"
        listed = httpx.get(f"{told['url']}/models", timeout=30, trust_env=False).json()["data"]
        assert [one["id"] for one in listed] == ["policy"]
        body = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
        answers = [
            httpx.post(f"{told['url']}/completions", json=body, timeout=60, trust_env=False)
            for _ in range(2)
        ]
        assert answers[0].status_code == 200, answers[0].text
        assert answers[0].json()["choices"] == answers[1].json()["choices"]
        scratch = list(run.glob(".serve-*"))
        assert len(scratch) == 1
        child = child_of(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not child.is_running()
    assert not list(run.glob(".serve-*"))


def test_a_policy_whose_command_was_killed_ends_by_itself(run: Path) -> None:
    with serving(str(run / "model")) as (process, _):
        child = child_of(process)
        process.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            deadline = time.monotonic() + 60
            while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline
                time.sleep(0.1)


def test_a_runs_held_out_rows_get_the_score_that_the_run_gave_them(run: Path) -> None:
    code, (told,) = evaluated(
        run.parent, str(run), "--tasks", "held_out,gcd:5", **warm_processes.with_vllm()
    )
    assert code == 0
    after = json.loads((run / "summary.json").read_text())["held_out"]["after"]
    found = told["tasks"]["held_out"]["score"]
    assert found["num_prompts"] == after["num_prompts"] == 4
    assert found["mean"] == pytest.approx(after["score"], abs=ROUNDING)
    assert found["standard_error"] == pytest.approx(after["standard_error"], abs=ROUNDING)
    assert told["tasks"]["gcd"]["num_prompts"] == 5
    (line,) = [json.loads(one) for one in (run / "evaluations.jsonl").read_text().splitlines()]
    assert line["step"] == 2
    assert line["metrics"]["evaluated/held_out/score"] == found["mean"]
    assert (run / line["file"]).is_file()
    assert not list(run.glob(".serve-*"))


# Episodes of an evaluation: endpoint/test_playing_episodes, without a run of its own.
@pytest.mark.slow
def test_held_out_episodes_get_the_score_that_the_run_gave_them(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    environment = {"type": "python", "environment": f"{tmp_path / 'own.py'}:Nods"}
    recipe = tiny_recipe(
        tiny_model(tmp_path / "base"),
        actor__environment={**environment, "max_turns": 3, "max_turn_tokens": 8},
        algorithm__sampling__max_new_tokens=48,
        reward__source=rewards(tmp_path, "environment"),
    )
    made = CliRun(recipe, tmp_path)
    with contextlib.closing(made):
        assert made.wait(RUN_S) == 0, made.output
        run = made.out
    code, (told,) = evaluated(tmp_path, str(run), **warm_processes.with_vllm())
    assert code == 0
    after = json.loads((run / "summary.json").read_text())["held_out"]["after"]
    found = told["tasks"]["held_out"]["score"]
    assert found["num_prompts"] == after["num_prompts"] == 4
    assert found["mean"] == pytest.approx(after["score"], abs=ROUNDING)
    assert found["standard_error"] == pytest.approx(after["standard_error"], abs=ROUNDING)
    rows = rows_beside(tmp_path / told["file"])
    assert all(row["completion"].startswith(" hello") for row in rows)
    assert any(" mhm " in row["completion"] for row in rows)


@pytest.mark.slow
def test_smollm2_knows_some_sums_and_draws_the_same_twice(tmp_path: Path, suite: Path) -> None:
    model = Path(__file__).resolve().parents[2] / ".models" / "SmolLM2-135M-Instruct"
    if not model.is_dir():
        pytest.skip("make model brings it")
    prefixed = {
        **SUMS,
        "size": 24,
        "question_template": "{expression} = ?",
        "assistant_prefix": "{expression} =",
    }
    prefixed["system_prompt"] = "Answer with only the number."
    suite.write_text(yaml.safe_dump({"sums": prefixed}))
    drawn = ("--tasks", str(suite), "--samples", "4", "--pass-at", "1,4", "--max-tokens", "8")
    code, lines = evaluated(tmp_path, str(model), str(model), *drawn)
    assert code == 0
    first, second, difference = lines
    # 20 % of such sums were answered in four tries: none of 24 has a chance of 0.005, once for all
    # draws of this seed.
    assert first["tasks"]["sums"]["pass_at"]["4"]["mean"] > 0
    assert difference["difference"]["num_prompts"] == 24
    texts = [
        {(row["key"], row["sample"]): row["completion"] for row in rows_beside(tmp_path / file)}
        for file in (first["file"], second["file"])
    ]
    # Sums in another order may turn a draw here and there: requests meet in other batches.
    alike = sum(texts[0][key] == texts[1][key] for key in texts[0])
    assert alike >= 0.95 * len(texts[0])
