"""`rolemesh check` finds what would stop a run, says what to change, and loads no model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import warm_processes
from support.slow_cases import mostly_slow
from support.tiny_models import write_tiny_classifier, write_tiny_llama

from rolemesh.coordinator.commands.findings import recipe_checks
from rolemesh.coordinator.commands.findings.placing import load_placed
from rolemesh.coordinator.run.services.host_gpus import host_gpus

ROLEMESH = [sys.executable, "-m", "rolemesh.coordinator.commands.cli"]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_losses.py"
REWARD = """
def right(completions, answer, **kwargs):
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

def broken(completions, **kwargs):
    raise RuntimeError("no luck")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def recipe(tmp_path: Path, model: Path) -> dict[str, Any]:
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(12)]
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "run": {
            "name": "mine",
            "steps": 4,
            "prompts_per_step": 4,
            "evaluation": {"num_prompts": 2},
        },
        "algorithm": {
            "type": "grpo",
            "sampling": {"samples_per_prompt": 4, "max_new_tokens": 8},
            "mini_batch_rows": 8,
        },
        "actor": {
            "model": {"path": str(model)},
            "rollout": {"type": "hf", "max_model_len": 128},
            "data": {"type": "jsonl", "path": "my.jsonl", "held_out_size": 2},
        },
        "reward": {"source": "python:rewards.py:right"},
    }


def check(
    folder: Path, recipe: dict[str, Any], *arguments: str
) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, findings, and what was printed."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    # A machine that is busy takes longer than the command's own bound.
    timeout = [] if "--timeout" in arguments else ["--timeout", "80"]
    ended = subprocess.run(
        [*ROLEMESH, "check", "recipe.yaml", *arguments, *timeout],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=folder,
        env={**os.environ, **warm_processes.everything(), "COLUMNS": "200"},
    )
    lines = ended.stdout.splitlines() if "--json" in arguments else []
    return ended.returncode, [json.loads(line) for line in lines], ended.stdout + ended.stderr


def found(findings: list[dict[str, Any]], what: str) -> list[tuple[str, str, str]]:
    return [(one["level"], one["text"], one["remedy"]) for one in findings if one["what"] == what]


def test_a_recipe_that_runs_has_nothing_wrong_with_it(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    code, findings, _ = check(tmp_path, recipe, "--json")
    assert code == 0
    assert {one["level"] for one in findings} == {"OK"}, findings
    assert [one["what"] for one in findings] == [
        *("recipe", "algorithm", "models", "data", "prompt", "lengths", "reward"),
        *("memory", "shared memory", "disk"),
    ]
    assert found(findings, "models")[0][1].endswith("whole: actor.model.path llama")
    assert found(findings, "data")[0][1] == "10 rows to train on, 2 held out"
    assert "actor.generate -> reward.compute_reward" in found(findings, "algorithm")[0][1]
    shown = found(findings, "prompt")[0][1]
    assert "| <|im_start|>user\n" in shown
    assert "| What is " in shown
    assert "| <|im_start|>assistant" in shown
    # The first prompt of the run with its own answer as the completion.
    assert "right gives 1" not in shown
    assert "python gives 1 to the first prompt" in found(findings, "reward")[0][1]


def test_model_folders_that_cannot_work_fail(recipe: dict[str, Any], tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    put(recipe, "actor.model.path", "model")
    judge = {
        "type": "classifier",
        "model": {"path": str(write_tiny_classifier(tmp_path / "judge"))},
    }
    put(recipe, "reward.source", judge)
    (tmp_path / "judge" / "tokenizer.json").write_text('{"added_tokens": [], "model": 3}')
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace('"llama"', '"gemma99"'))
    code, findings, _ = check(tmp_path, recipe, "--json")
    assert code == 1
    (family, tokenizer) = found(findings, "models")
    assert {family[0], tokenizer[0]} == {"FAIL"}
    assert "actor.model.path 'model' has the model_type 'gemma99', which transf" in family[1]
    assert "reward.source.model.path" in tokenizer[1]
    assert "has no tokenizer that can be read (" in tokenizer[1]
    put(recipe, "actor.rollout.type", "vllm")
    (model / "config.json").write_text(config.replace('"llama"', '"gpt_oss"'))
    code, findings, _ = check(tmp_path, recipe, "--json")
    assert code == 1
    assert "has the model_type 'gpt_oss', and rollout.type is 'vllm'" in str(findings)
    (model / "config.json").write_text(config)
    with (model / "model.safetensors").open("r+b") as weights:
        weights.truncate(20_000)
    code, findings, _ = check(tmp_path, recipe, "--json")
    assert code == 1
    ((level, text, _),) = found(findings, "recipe")
    assert level == "FAIL"
    assert "actor.model.path 'model': model.safetensors has 20000 bytes, but its header" in text


def test_people_get_lines_and_no_run_is_made(recipe: dict[str, Any], tmp_path: Path) -> None:
    code, _, output = check(tmp_path, recipe)
    assert code == 0
    assert "OK    data           10 rows to train on, 2 held out" in output
    assert not (tmp_path / "runs").exists()


def test_losses_and_estimators_of_the_user_are_loaded_and_tried(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    put(recipe, "algorithm.advantages", f"python:{EXAMPLE}:group_relative")
    loss = {"type": "python", "function": f"{EXAMPLE}:clipped", "config": {"high": 0.3}}
    put(recipe, "algorithm.policy_loss", loss)
    code, findings, _ = check(tmp_path, recipe, "--json")
    assert code == 0
    ((_, graph, _),) = found(findings, "algorithm")
    ((_, functions, _),) = found(findings, "own functions")
    assert "actor.compute_advantages -> actor.update" in graph
    assert functions == f"loaded {EXAMPLE}:group_relative, {EXAMPLE}:clipped"
    put(recipe, "algorithm.policy_loss.config", {"hihg": 0.3})
    code, findings, _ = check(tmp_path, recipe, "--json")
    assert code == 1
    ((level, text, _),) = found(findings, "own functions")
    assert level == "FAIL"
    assert text.startswith("algorithm.policy_loss.config is {'hihg': 0.3}, and ")
    assert f"({EXAMPLE}:" in text


def put(recipe: dict[str, Any], where: str, value: Any) -> None:
    *above, last = where.split(".")
    for name in above:
        recipe = recipe.setdefault(name, {})
    recipe[last] = value


LOSS = {"type": "ppo_policy", "kl_in_loss": 0.1}
LONG = '{"prompt": "%s", "answer": "1"}\n'


@pytest.mark.parametrize(
    ("changes", "what", "level", "text", "remedy"),
    mostly_slow(
        # One of each kind of finding: each case starts a process that reads data.
        (0, 4, 6, 8, 12),
        [
            (
                {"algorithm.policy_loss": LOSS},
                *("algorithm", "FAIL", "algorithm.policy_loss.kl_in_loss is 0.1"),
                "",
            ),
            (
                {"algorithm.policy_loss": LOSS, "actor.data.path": "gone.jsonl"},
                *("algorithm", "FAIL", "no section reference"),
                "",
            ),
            ({"actor.data.path": "gone.jsonl"}, "recipe", "FAIL", "gone.jsonl", ""),
            ({"actor.data.path": "empty.jsonl"}, "data", "FAIL", "holds no training prompt", ""),
            ({"actor.data.path": "broken.jsonl"}, "data", "FAIL", "line 2: not JSON", ""),
            (
                {"actor.data.columns": {"prompt": "question"}},
                *("data", "FAIL", "has no column 'question'"),
                "",
            ),
            (
                {"actor.data.path": "long.jsonl", "actor.data.held_out_size": 0},
                *(
                    "lengths",
                    "FAIL",
                    "1 of 3 prompts have rollout.max_model_len (128) tokens",
                ),
                "set actor.data.max_prompt_tokens to 120",
            ),
            (
                {"algorithm.sampling.max_new_tokens": 110},
                *("lengths", "WARN", "12 of 12 prompts are longer than rollout.max_model_len 128"),
                "raise rollout.max_model_len to",
            ),
            (
                {"algorithm.mini_batch_rows": 6},
                *("sizes", "WARN", "split the completions of a prompt"),
                "a multiple of 4",
            ),
            (
                {"run.prompts_per_step": 11},
                *("sizes", "WARN", "11, but there are 10 training prompts"),
                "lower run.prompts_per_step to 10",
            ),
            (
                {"actor.data.held_out_size": 9},
                *("sizes", "WARN", "9 prompts are held out and 3 are left"),
                "lower held_out_size",
            ),
            (
                {"run.evaluation.num_prompts": 3},
                *("evaluation", "FAIL", "num_prompts is 3, but 2 prompts are held out"),
                "to 2 at most",
            ),
            (
                # Nothing is sampled: the loss of held-out rows is computed, and needs as many.
                {
                    "algorithm": {"type": "sft"},
                    "run.evaluation.num_prompts": 3,
                    "actor.data.columns": {"completion": "answer"},
                },
                *("evaluation", "FAIL", "num_prompts is 3, but 2 prompts are held out"),
                "to 2 at most",
            ),
            (
                {"reward.source": "python:rewards.py:broken"},
                "reward",
                "FAIL",
                "no luck",
                "reward check",
            ),
            (
                {"reward.source": "http://127.0.0.1:1/x"},
                *("reward", "FAIL", "http://127.0.0.1:1/x"),
                "reward check",
            ),
            (
                {"reward.source": {"type": "arithmetic"}, "actor.data.path": "unanswered.jsonl"},
                *("data", "FAIL", "1 rows have no expected answer (the first: data.path"),
                "actor.data.columns.answer",
            ),
            (
                {"algorithm": {"type": "sft"}},
                *("data", "FAIL", "lacks the column 'completion', which the algorithm trains on"),
                "",
            ),
            (
                {"critic": {"model": {"path": "x"}}},
                "recipe",
                "WARN",
                "section critic is not used",
                "take",
            ),
        ],
    ),
)
def test_what_is_wrong_is_found_and_what_to_do_is_said(
    changes: dict[str, Any],
    what: str,
    level: str,
    text: str,
    remedy: str,
    recipe: dict[str, Any],
    tmp_path: Path,
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    short = LONG % "a"
    (tmp_path / "long.jsonl").write_text(short + short + LONG % ("1 " * 200))
    (tmp_path / "unanswered.jsonl").write_text(
        '{"prompt": "b"}\n' + "".join(LONG % letter for letter in "cdefghi")
    )
    for where, value in changes.items():
        put(recipe, where, value)
    code, findings, output = check(tmp_path, recipe, "--json")
    matching = [one for one in found(findings, what) if text in one[1]]
    assert matching, output
    assert matching[0][0] == level
    assert remedy in matching[0][2]
    assert code == any(one["level"] == "FAIL" for one in findings)


def test_a_reward_that_keeps_silent_does_not_hold_the_check(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(
        "import time\ndef right(completions, **kwargs):\n    time.sleep(600)\n"
    )
    code, findings, _ = check(tmp_path, recipe, "--json", "--timeout", "8")
    ((level, text, _),) = found(findings, "reward")
    assert (code, level) == (1, "FAIL")
    assert "2 s" in text


ENVIRONMENT = """
from rolemesh.engine.environments.base import Environment, Observation

class Talk(Environment):
    def __init__(self, cost=0.1):
        pass

    def reset(self, row):
        print("a line of the user")
        if row.answer:
            self.answer = REACHED

    def step(self, completion_text):
        return Observation(done=True)
"""


@pytest.mark.parametrize(
    ("changes", "level", "text"),
    mostly_slow(
        (0, 3),
        [
            ({}, "OK", "env.py:Talk begins an episode with the first prompt"),
            ({"config": {"csot": 1}}, "FAIL", "environment.config is {'csot': 1}, and 'env.py:T"),
            ({"environment": "env.py:Tlak"}, "FAIL", "env.py has no 'Tlak': name another"),
            ({"environment": "late.py:Talk"}, "FAIL", "NameError(\"name 'REACHED' is not"),
        ],
    ),
)
def test_an_environment_is_loaded_made_and_begun(
    changes: dict[str, Any], level: str, text: str, recipe: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "late.py").write_text(ENVIRONMENT)
    (tmp_path / "env.py").write_text(ENVIRONMENT.replace("REACHED", "row.answer"))
    made = {"type": "python", "environment": "env.py:Talk", **changes}
    put(recipe, "actor.environment", made)
    code, findings, _ = check(tmp_path, recipe, "--json")
    ((told_level, told_text, _),) = found(findings, "environment")
    assert told_level == level
    assert text in told_text
    assert code == (level == "FAIL")
    # The checks behind it are made all the same.
    assert found(findings, "reward")


def test_data_that_take_too_long_leave_the_rest_of_the_findings(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "curriculum.py").write_text("import time\ntime.sleep(600)\n")
    curriculum = {"type": "python", "function": "curriculum.py:order"}
    put(recipe, "actor.data.curriculum", curriculum)
    put(recipe, "algorithm.advantages", f"python:{EXAMPLE}:group_relative")
    code, findings, _ = check(tmp_path, recipe, "--json", "--timeout", "3")
    skipped = [(one["what"], one["text"]) for one in findings if one["level"] == "SKIP"]
    text = "not looked at within 3 s; give --timeout 60"
    wanted = ("data", "evaluation", "prompt", "lengths", "reward", "own functions")
    assert skipped == [(what, text) for what in wanted]
    assert found(findings, "disk")
    assert code == 3


async def test_the_time_does_not_pass_while_rows_are_read(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the place of the process that reads: 2.5 s of rows, then what it says of them.
    lines = ['{"type": "reading"}'] * 5
    told = {"train": 10, "held_out": 2, "filtered": 0, "unanswered": 0, "first_unanswered": ""}
    script = tmp_path / "python"
    spoken = "".join(f"echo '{line}'; sleep 0.5\n" for line in lines)
    script.write_text(f"#!/bin/sh\n{spoken}echo '{json.dumps({'type': 'data', **told})}'\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    gpus = host_gpus()
    loaded = load_placed([Path("recipe.yaml")], gpus, overrides=(), environment={})
    findings = [one async for one in recipe_checks.recipe_findings(loaded, 1.5, gpus)]
    assert [one.text for one in findings if one.what == "data"] == [
        "10 rows to train on, 2 held out"
    ]


CHECKS = ("data", "evaluation", "prompt", "reward", "own functions")


@pytest.mark.parametrize(
    ("told", "left"),
    [
        ({"type": "data"}, ("prompt", "reward", "own functions")),
        # Rows that are text alone have no prompt: what comes behind it tells that it was its turn.
        ({"type": "reward"}, ("own functions",)),
        ({"type": "error", "what": "functions"}, ()),
        ({"type": "error", "what": "packages"}, CHECKS),
    ],
)
def test_what_is_left_of_the_checks_stands_behind_what_was_told(
    told: dict[str, str], left: tuple[str, ...]
) -> None:
    assert recipe_checks._left(CHECKS, told) == left


def test_a_recipe_that_cannot_be_read_is_bad_input(recipe: dict[str, Any], tmp_path: Path) -> None:
    put(recipe, "run.stepz", 3)
    code, _, output = check(tmp_path, recipe)
    assert code == 2
    assert "did you mean run.steps?" in output
    assert "Traceback" not in output


def test_the_process_that_reads_data_imports_no_torch(model: Path, tmp_path: Path) -> None:
    (tmp_path / "my.jsonl").write_text(LONG % "a")
    spec = {
        "models": [{"field": "a.model.path", "path": str(model), "has_tokenizer": True}],
        "model": str(model),
        "data": {"type": "jsonl", "path": str(tmp_path / "my.jsonl")},
        "seed": 0,
        "given": "prompt",
        "max_model_len": 64,
        "max_new_tokens": 8,
    }
    program = (
        "import sys\n"
        "from rolemesh.services.preview.__main__ import main\n"
        "main()\n"
        "print('torch' in sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(spec), capture_output=True, text=True
    )
    *told, has_torch = ended.stdout.splitlines()
    assert [json.loads(line)["type"] for line in told] == [*("models", "data", "prompt", "lengths")]
    assert has_torch == "False"
    assert ended.stderr == ""
