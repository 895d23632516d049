"""`rolemesh reward check` finds what is wrong with a reward, and says nothing of a right one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import warm_processes
from support.example_servers import EXAMPLES, OUTSIDER, ROOT, compile_protos, script
from support.image_tasks import data_of, write_task
from support.tiny_models import write_tiny_llama

LYING = Path(__file__).parents[1] / "support" / "lying_rewards.py"
HOSTILE = LYING.with_name("hostile_rewards.py")
ROLEMESH = [sys.executable, "-m", "rolemesh.coordinator.commands.cli"]


def begin(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*ROLEMESH, "reward", "check", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **warm_processes.commands()},
    )


def end(begun: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    with begun:
        try:
            output, errors = begun.communicate(timeout=90)
        finally:
            begun.kill()
    return subprocess.CompletedProcess(begun.args, begun.returncode, output, errors)


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return end(begin(*arguments))


def findings(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and findings by probe."""
    return findings_of(check("--json", *arguments))


def findings_of(
    ended: subprocess.CompletedProcess[str],
) -> tuple[int, dict[str, dict[str, Any]]]:
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert lines, ended.stderr
    assert lines[-1]["type"] == "verdict"
    return ended.returncode, {line["probe"]: line for line in lines if line["type"] == "finding"}


@pytest.fixture(scope="module", autouse=True)
def nobody_there() -> Iterator[subprocess.Popen[str]]:
    """A check that waits 10 s for a server: beside the other tests, hence begun before them."""
    with begin("--json", "grpc://127.0.0.1:1") as begun:
        yield begun
        begun.kill()


def levels(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {probe: finding["level"] for probe, finding in found.items()}


PROBES = [
    *("answer", "repeat", "order", "alone", "empty", "unicode", "long", "concurrency", "malformed"),
    "after",
]


@pytest.mark.parametrize("example", ["reward_server.py", "reward_http_openrlhf.py"])
def test_nothing_is_wrong_with_the_examples(example: str) -> None:
    with script(EXAMPLES / example, "0") as url:
        code, found = findings(url)
    assert levels(found) == dict.fromkeys(PROBES, "ok"), found
    assert code == 0


def test_a_function_is_checked_like_a_server() -> None:
    code, found = findings(f"python:{EXAMPLES / 'reward_function_trl.py'}:accuracy")
    assert code == 0
    assert levels(found)["order"] == "ok"
    assert levels(found)["concurrency"] == "skip"


@pytest.mark.parametrize(
    ("fault", "probe", "level", "text"),
    [
        ("short", "answer", "fail", "expected 6 rewards"),
        ("nan", "answer", "fail", "a finite number for row 0"),
        ("text", "answer", "fail", "a number for row 0, found the text 'good'"),
        ("sorted", "order", "fail", "do not follow their rows"),
        ("random", "repeat", "warn", "the same rows got other rewards"),
        ("random", "order", "skip", "change by themselves"),
        ("constant", "order", "skip", "the same reward"),
        ("compares", "alone", "warn", "a row alone got another reward"),
        ("empty", "empty", "fail", "status 500"),
        ("ascii", "unicode", "fail", "status 500"),
        ("brief", "long", "warn", "status 413"),
        ("alone", "concurrency", "fail", "at once failed"),
        ("malformed", "malformed", "warn", "does not refuse what is no request"),
    ],
)
def test_what_is_wrong_is_found(fault: str, probe: str, level: str, text: str) -> None:
    with script(LYING, fault) as url:
        code, found = findings(url)
    assert found[probe]["level"] == level
    assert text in found[probe]["text"]
    assert code == ("fail" in levels(found).values())


def test_a_service_that_knows_keys_cannot_hide_behind_them(tmp_path: Path) -> None:
    image = compile_protos(ROOT / "protos", tmp_path / "reward.binpb")
    with script(OUTSIDER, str(image), "reward", "keys") as url:
        # Its reward is the number of keys that it has seen.
        code, found = findings(url, "--prompt=a", "--completion=a key")
    assert levels(found)["repeat"] == "warn"
    assert code == 0


def test_nobody_there_is_told_with_a_remedy(nobody_there: subprocess.Popen[str]) -> None:
    code, found = findings_of(end(nobody_there))
    assert code == 1
    assert list(found) == ["open"]
    assert "reachable" in found["open"]["text"]


def test_a_model_is_sent_broken_json_where_it_is_asked() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                texts = json.loads(body)["inputs"][0]["data"]
            except ValueError:
                texts = [""]  # what is broken gets a reward too
            values = [float(len(text)) for text in texts]
            output = {"name": "reward", "shape": [len(values)], "data": values}
            answer = json.dumps({"outputs": [output]}).encode()
            self.send_response(200 if self.path == "/v2/models/m/infer" else 404)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        code, found = findings(f"{{type: kserve, urls: '{url}', model: m}}")
    finally:
        server.shutdown()
        server.server_close()
    assert code == 0
    assert levels(found)["malformed"] == "warn"


def test_a_function_that_cannot_be_imported_is_told() -> None:
    code, found = findings("python:no.such.module:f")
    assert code == 1
    assert "ModuleNotFoundError" in found["open"]["text"]


def test_people_see_what_was_sent_and_what_came() -> None:
    with script(LYING, "empty") as url:
        ended = check(url)
    assert ended.returncode == 1
    assert f"{url}: sending 6 rows" in ended.stdout
    assert "2  'What is 12 + 30?' -> '42'" in ended.stdout
    assert "FAIL  empty" in ended.stdout
    assert "-> a policy writes such things" in ended.stdout
    assert "1 found that a run would fail" in ended.stdout


def test_rows_of_a_file_are_sent(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"prompt": "a", "completion": "bb", "level": 3}\n\n{"prompt": "a", "completion": "c"}\n'
    )
    with script(LYING, "") as url:
        ended = check("--json", "--jsonl", str(rows), url)
    judged = json.loads(ended.stdout.splitlines()[0])
    assert [row["reward"] for row in judged["rows"]] == [2.0, 1.0]


def test_rows_without_a_completion_are_sent_with_their_answer_and_a_wrong_one(
    tmp_path: Path,
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": 4200}\n{"prompt": "b"}\n')
    with script(LYING, "") as url:
        ended = check("--json", "--jsonl", str(rows), url)
    judged = json.loads(ended.stdout.splitlines()[0])
    assert [(row["prompt"], row["completion"]) for row in judged["rows"]] == [
        ("a", "4200"),
        ("a", "I do not know."),
        ("b", "I do not know."),
    ]
    assert ended.returncode == 0


def test_a_server_that_fails_now_and_then_is_a_warning() -> None:
    with script(LYING, "flaky") as url:
        code, found = findings(url)
    assert code == 0, found
    assert [probe for probe, one in found.items() if one["level"] != "ok"] == ["tries"]
    assert found["tries"]["level"] == "warn"
    assert "failed and were answered when they were sent again" in found["tries"]["text"]
    assert "status 503" in found["tries"]["text"]


def test_a_server_that_dies_is_one_finding() -> None:
    with script(LYING, "dies") as url:
        code, found = findings(url)
    assert code == 1
    assert list(found) == ["answer", "repeat", "order", "alone", "empty", "lost"]
    assert "since the probe 'unicode'" in found["lost"]["text"]


def policy(folder: Path) -> dict[str, Any]:
    """Sections of a recipe whose data a reward of arithmetic would not understand."""
    rows = [{"prompt": f"Say {n} times hop", "answer": "hop " * n} for n in range(1, 9)]
    (folder / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "run": {"name": "mine", "steps": 1, "prompts_per_step": 2},
        "algorithm": {"type": "grpo"},
        "actor": {
            "model": {"path": str(write_tiny_llama(folder / "tiny"))},
            "rollout": {"type": "hf"},
            "data": {"type": "jsonl", "path": str(folder / "my.jsonl")},
        },
    }


def test_all_rewards_of_a_recipe_are_checked_with_rows_of_its_data(tmp_path: Path) -> None:
    recipe = policy(tmp_path)
    with script(LYING, "") as url:
        recipe["reward"] = [
            url,
            {"source": {"type": "arithmetic"}, "weight": 0.5},
            f"python:{EXAMPLES / 'reward_function_trl.py'}:brevity",
        ]
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        ended = check("--json", "--recipe", str(tmp_path / "recipe.yaml"))
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == 0, ended.stderr
    judged = {line["source"]: line["rows"] for line in lines if line["type"] == "judged"}
    assert len(judged) == 2
    for rows in judged.values():
        assert len(rows) == 6
        for row in rows:
            # As the policy sees it, and with the data's own answer.
            assert row["prompt"].startswith("<|im_start|>user\nSay ")
            assert row["answer"].startswith("hop ")
        assert [row["completion"] for row in rows[::2]] == [row["answer"] for row in rows[::2]]
        assert {row["completion"] for row in rows[1::2]} == {"I do not know."}


def test_functions_are_shown_the_images_of_a_recipes_data(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", seed=1)
    (tmp_path / "seen.py").write_text(
        "def seen(completions, images):\n    return [float(image.width) for (image,) in images]\n"
    )
    recipe = policy(tmp_path)
    recipe["actor"] |= {"model": {"path": str(task / "model")}, "data": data_of(task)}
    recipe["reward"] = f"python:{tmp_path / 'seen.py'}:seen"
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    ended = check("--json", "--recipe", str(tmp_path / "recipe.yaml"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    (judged,) = [line["rows"] for line in lines if line["type"] == "judged"]
    assert len(judged) == 6
    # Squares of both sizes, as they are in the files.
    assert {row["reward"] for row in judged} <= {28.0, 56.0}


def test_rows_that_are_given_go_before_those_of_a_recipe(tmp_path: Path) -> None:
    recipe = policy(tmp_path)
    with script(LYING, "") as url:
        recipe["reward"] = url
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        arguments = ["--recipe", str(tmp_path / "recipe.yaml"), "--prompt=a", "--completion=b"]
        ended = check("--json", *arguments)
    assert [row["prompt"] for row in json.loads(ended.stdout.splitlines()[0])["rows"]] == ["a"]


def test_data_of_a_recipe_that_cannot_be_read_are_bad_input(tmp_path: Path) -> None:
    recipe = {**policy(tmp_path), "reward": "grpc://127.0.0.1:1"}
    (tmp_path / "my.jsonl").write_text("")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    ended = check("--recipe", str(tmp_path / "recipe.yaml"))
    assert ended.returncode == 2
    assert "the recipe's data cannot be read: data.path is" in ended.stderr
    assert "give rows of your own with --jsonl" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "there is no SOURCE"),
        (["foo"], "'foo' is no source of rewards"),
        (["{type: kserve, urls: 'http://h:1'}"], "model"),
        (["{type: arithmetic}"], "computes itself"),
        (["grpc://host"], "give the port too"),
        (["grpc://h:1", "--prompt=a"], "stand together"),
        (["grpc://h:1", "--jsonl=/nowhere"], "cannot be read"),
        (["--recipe", str(ROOT / "recipes" / "quickstart-grpo.yaml")], "no server or function"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], text: str) -> None:
    ended = check(*arguments)
    assert ended.returncode == 2
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_check_imports_no_torch() -> None:
    program = (
        "import sys, rolemesh.services.reward.outside.check.__main__; "
        "print(sorted({'torch', 'vllm', 'transformers', 'numpy', 'rolemesh.coordinator'} "
        "& set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[]"
