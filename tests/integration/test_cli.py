"""The command as users run it, against fake roles on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml
from support import warm_processes
from support.fake_roles import FakeMesh, fake_mesh, fake_recipe, until

from rolemesh.coordinator.run.folders.ownership import held

ROLEMESH = [sys.executable, "-m", "rolemesh.coordinator.commands.cli"]
STEPS = 4


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with fake_mesh() as started:
        yield started


@pytest.fixture
def recipe_file(tmp_path: Path, mesh: FakeMesh) -> Path:
    services = {role: {"address": address} for role, address in mesh.addresses.items()}
    recipe = fake_recipe(steps=STEPS, services=services)
    path = tmp_path / "fake.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    return path


@pytest.fixture(autouse=True)
def _interrupts_are_heeded() -> Iterator[None]:
    """Children inherit what is ignored, e.g. when the tests run in a shell's background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def start(
    *arguments: str | Path,
    folder: Path,
    output: int = asyncio.subprocess.PIPE,
    before: Sequence[str] = (),
    added: Mapping[str, str] = MappingProxyType({}),
) -> asyncio.subprocess.Process:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLEMESH_")}
    return await asyncio.create_subprocess_exec(
        *before,
        *ROLEMESH,
        *map(str, arguments),
        cwd=folder,
        env={**environment, "COLUMNS": "200", **added},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=asyncio.subprocess.PIPE,
    )


async def rolemesh(*arguments: str | Path, folder: Path) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    process = await start(*arguments, folder=folder, added=warm_processes.commands())
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


async def test_train_writes_a_run_and_tells_of_it(recipe_file: Path, tmp_path: Path) -> None:
    code, output, errors = await rolemesh("train", recipe_file, "--out", "run", folder=tmp_path)
    assert (code, errors) == (0, "")
    assert f"step {STEPS} reward" in output
    assert "held-out score (8 prompts)" in output
    assert f"curves {sys.executable.rpartition('/')[0]}" in output or "curves tensorboard" in output
    for name in ("metrics.jsonl", "summary.json", "config.yaml", "logs/coordinator.log", "model"):
        assert (tmp_path / "run" / name).exists()
    # Nobody answers for the run any more.
    assert not (tmp_path / "run" / "coordinator.json").exists()

    code, output, _ = await rolemesh("status", "run", "--json", folder=tmp_path)
    told = json.loads(output)
    assert (code, told["state"], told["step"], told["num_steps"]) == (0, "succeeded", STEPS, STEPS)
    code, output, _ = await rolemesh("logs", "run", "coordinator", folder=tmp_path)
    assert code == 0
    assert f"step {STEPS}: " in output


async def test_trace_writes_every_call_and_shows_what_each_step_waited_for(
    recipe_file: Path, tmp_path: Path
) -> None:
    await rolemesh("train", recipe_file, "--out", "run", folder=tmp_path)
    code, output, errors = await rolemesh("trace", "run", folder=tmp_path)
    assert (code, errors) == (0, "")
    assert "critical path" in output
    assert output.count("actor.generate") == STEPS
    assert "run/trace.json: open it with" in output
    lines = (tmp_path / "run/dataflow.jsonl").read_text().splitlines()
    nodes = [node for line in lines for node in json.loads(line)["nodes"]]
    events = json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
    calls = [event for event in events if event["ph"] == "X"]
    assert [(call["name"], call["args"]["step"]) for call in calls] == [
        (f"{node['role']}.{node['method']}", node["step"]) for node in nodes
    ]

    code, output, _ = await rolemesh(
        *("trace", "run", "--step", "2", "--out", "two.json", "--json"), folder=tmp_path
    )
    told = [json.loads(line) for line in output.splitlines()]
    assert code == 0
    assert [(line["type"], line.get("step")) for line in told] == [
        ("critical_path", 2),
        ("trace", None),
    ]
    assert told[0]["path"][0]["node"] == "actor.generate"
    assert told[0]["critical_path_seconds"] <= told[0]["seconds"]
    steps = {
        event["args"]["step"]
        for event in json.loads((tmp_path / "two.json").read_text())["traceEvents"]
        if event["ph"] == "X"
    }
    assert steps == {2}

    for arguments, message in (
        (["run", "--step", "9"], f"no graph of step 9: it has steps 1 to {STEPS}"),
        (["run", "--out", "gone/trace.json"], "--out gone/trace.json cannot be written"),
    ):
        code, _, errors = await rolemesh("trace", *arguments, folder=tmp_path)
        assert code == 2
        assert errors.startswith("error: ")
        assert message in errors


async def test_json_output_is_json_alone(recipe_file: Path, tmp_path: Path) -> None:
    code, output, errors = await rolemesh(
        "train", recipe_file, "--json", "--set", "run.seed=7", folder=tmp_path
    )
    assert (code, errors) == (0, "")
    lines = [json.loads(line) for line in output.splitlines()]
    steps = [line for line in lines if line["type"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all("reward/mean" in line["metrics"] for line in steps)
    assert lines[-1]["type"] == "summary"
    assert lines[-1]["seed"] == 7
    # Without --out, runs go to runs/.
    assert Path(lines[-1]["directory"]).parent == tmp_path / "runs"
    code, output, _ = await rolemesh("status", folder=tmp_path)
    assert code == 0
    assert "succeeded" in output


async def test_printed_config_is_a_recipe(recipe_file: Path, tmp_path: Path) -> None:
    first = await rolemesh(
        "train", recipe_file, "--set", "run.seed=5", "--print-config", folder=tmp_path
    )
    printed = tmp_path / "printed.yaml"
    printed.write_text(first[1])
    second = await rolemesh("train", printed, "--print-config", folder=tmp_path)
    assert first[0] == second[0] == 0
    assert yaml.safe_load(first[1])["run"]["seed"] == 5
    assert first[1] == second[1]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "run.sede=1"], "did you mean run.seed?"),
        (["--set", "run.steps=0"], "run.steps is 0"),
        (["--set", "services.actor.address=null"], "actor.model.path is '/models/none'"),
        (
            [
                *("--set", "reference=null", "--set"),
                "algorithm={type: grpo, policy_loss: {type: ppo_policy, kl_in_loss: 0.1}}",
            ],
            "the recipe has no section reference: add one",
        ),
        (
            ["--set", "store.type=redis", "--set", "store.url=redis://127.0.0.1:1/0"],
            "store.url: the store at redis://127.0.0.1:1/0 does not answer",
        ),
        (
            ["--set", "store.type=redis", "--set", "store.url=redis://me@h:x/0"],
            "store.url is 'redis://***@h:x/0', which cannot be read",
        ),
        (
            ["--set", "store.type=redis", "--set", "store.url=http://me@h/0"],
            "store.url is 'http://***@h/0'",
        ),
        (
            ["--set", "store.type=redis", "--set", "store.url=redis://me:secret@h/0"],
            "--set store.url=redis://***@h/0: every user of this machine can read a password",
        ),
    ],
    ids=[
        "unknown-key",
        "wrong-value",
        "missing-model",
        "missing-section",
        "store-unreachable",
        "store-url-unreadable",
        "store-url-of-another-kind",
        "password-on-the-command-line",
    ],
)
async def test_bad_input_is_one_message_and_exit_code_2(
    recipe_file: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    code, _, errors = await rolemesh("train", recipe_file, *arguments, folder=tmp_path)
    assert code == 2
    assert errors.startswith("error: ")
    assert message in errors
    assert "Traceback" not in errors
    assert "secret" not in errors
    assert len(errors.splitlines()) == 1


async def test_folder_of_another_run_is_refused(recipe_file: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/summary.json").write_text("{}")
    code, _, errors = await rolemesh("train", recipe_file, "--out", "run", folder=tmp_path)
    assert code == 2
    assert "holds a run already" in errors


async def test_a_run_that_begins_anew_moves_the_one_of_its_folder_aside(
    recipe_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train = ("train", recipe_file, "--out", "run")
    assert (await rolemesh(*train, folder=tmp_path))[0] == 0
    old, names = (run / "metrics.jsonl").read_bytes(), {path.name for path in run.iterdir()}
    for refused, message in (
        (("train", "--resume", "run", "--from-start"), "--resume goes on: leave one out"),
        ((*train, "--from-start"), "another run is being made in"),
    ):
        with held(run):
            code, _, errors = await rolemesh(*refused, folder=tmp_path)
        assert code == 2
        assert message in errors
        assert {path.name for path in run.iterdir()} == names
    # Its own recipe, too, is read before it is moved.
    again = ("train", run / "config.yaml", "--out", "run", "--from-start")
    code, output, errors = await rolemesh(*again, "--set", "run.steps=1", folder=tmp_path)
    assert (code, errors) == (0, "")
    (aside,) = run.glob("before-*")
    assert f"the run that was there lies in {aside}" in output
    assert {path.name for path in aside.iterdir()} == names - {"coordinator.lock", "api-token"}
    assert (aside / "metrics.jsonl").read_bytes() == old
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1


async def test_a_start_that_failed_leaves_its_folder_free(
    recipe_file: Path, tmp_path: Path
) -> None:
    # The fakes have 16 held-out prompts.
    fails = ["--set", "run.evaluation.num_prompts=17"]
    for _ in range(2):
        code, _, errors = await rolemesh(
            "train", recipe_file, "--out", "run", *fails, folder=tmp_path
        )
        assert code == 1
        assert errors.startswith("error: run.evaluation.num_prompts is 17")
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 0
    code, _, errors = await rolemesh("train", recipe_file, "--out", "run", folder=tmp_path)
    assert (code, errors) == (0, "")
    code, output, _ = await rolemesh("status", "run", "--json", folder=tmp_path)
    assert json.loads(output)["state"] == "succeeded"
    # A run that has made steps keeps its folder.
    code, _, errors = await rolemesh("train", recipe_file, "--out", "run", folder=tmp_path)
    assert code == 2
    assert "holds a run already" in errors


@pytest.mark.parametrize("out", ["/proc/run", "file", "file/run"])
async def test_a_folder_that_cannot_be_written_is_told(
    out: str, recipe_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    code, _, errors = await rolemesh("train", recipe_file, "--out", out, folder=tmp_path)
    assert code == 2
    assert errors.startswith("error: run.directory: ")
    assert "cannot be written" in errors
    assert "choose another folder with --out" in errors
    assert len(errors.splitlines()) == 1


def test_the_package_is_the_command() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "rolemesh", "--help"], capture_output=True, text=True, check=True
    )
    assert "Usage: rolemesh [OPTIONS] COMMAND" in ended.stdout


async def test_verbose_adds_the_traceback(recipe_file: Path, tmp_path: Path) -> None:
    code, _, errors = await rolemesh(
        "train", recipe_file, "--set", "run.sede=1", "--verbose", folder=tmp_path
    )
    assert code == 2
    assert "Traceback" in errors


async def test_failed_run_is_one_message_and_exit_code_1(recipe_file: Path, tmp_path: Path) -> None:
    # The fakes have 16 held-out prompts.
    arguments = ["--json", "--set", "run.evaluation.num_prompts=17", "--out", "run"]
    code, output, errors = await rolemesh("train", recipe_file, *arguments, folder=tmp_path)
    assert code == 1
    assert errors.startswith("error: run.evaluation.num_prompts is 17")
    assert "Traceback" not in errors
    told = json.loads(output.splitlines()[-1])
    assert (told["type"], told["exit_code"]) == ("error", 1)
    # For whoever wants to know more.
    assert "Traceback" in (tmp_path / "run/logs/coordinator.log").read_text()
    code, output, _ = await rolemesh("status", "run", folder=tmp_path)
    assert "failed" in output


@pytest.mark.slow
async def test_lost_service_is_named(recipe_file: Path, tmp_path: Path, mesh: FakeMesh) -> None:
    process = await start(
        *("train", recipe_file, "--set", "run.steps=100000"),
        folder=tmp_path,
        added=warm_processes.commands(),
    )
    assert process.stdout is not None
    try:
        while b"step 1 " not in await process.stdout.readline():
            pass
        await mesh.roles["critic"].stop()
        _, errors = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 1
    assert "critic" in errors.decode()


async def test_interrupt_ends_after_the_step_with_everything_saved(
    recipe_file: Path, tmp_path: Path
) -> None:
    process = await start(
        *("train", recipe_file, "--json", "--set", "run.steps=100000", "--out", "run"),
        folder=tmp_path,
        added=warm_processes.commands(),
    )
    assert process.stdout is not None
    try:
        lines = []
        while not any(line["type"] == "step" for line in lines):
            lines.append(json.loads(await process.stdout.readline()))
        code, output, _ = await rolemesh("status", "run", "--json", folder=tmp_path)
        told = json.loads(output)
        assert (code, told["state"]) == (0, "running")
        process.send_signal(signal.SIGINT)
        rest, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 130
    summary = json.loads(rest.splitlines()[-1])
    assert (summary["type"], summary["state"]) == ("summary", "stopped")
    assert summary["steps"] >= 1
    assert summary["model_directory"] == str(tmp_path / "run/model")


@pytest.mark.parametrize("arguments", [[], ["--json"]], ids=["plain", "json"])
async def test_a_reader_that_goes_away_does_not_end_the_run(
    recipe_file: Path, tmp_path: Path, mesh: FakeMesh, arguments: list[str]
) -> None:
    gate = mesh.roles["actor"].gates["Update"] = asyncio.Event()
    reading, writing = os.pipe()
    process = await start(
        *("train", recipe_file, "--out", "run", *arguments),
        folder=tmp_path,
        output=writing,
        added=warm_processes.commands(),
    )
    os.close(writing)
    try:
        await until(lambda: "actor.Update" in mesh.running)
        os.close(reading)
        gate.set()
        _, errors = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert (process.returncode, errors) == (0, b"")
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == STEPS
    assert (tmp_path / "run/model").is_dir()
    log = (tmp_path / "run/logs/coordinator.log").read_text()
    assert log.count("the console is gone") == 1
    assert f"step {STEPS}: " in log


async def test_a_closed_terminal_does_not_end_the_run(
    recipe_file: Path, tmp_path: Path, mesh: FakeMesh
) -> None:
    gate = mesh.roles["actor"].gates["Update"] = asyncio.Event()
    master, terminal = os.openpty()
    process = await start("train", recipe_file, "--out", "run", folder=tmp_path, output=terminal)
    os.close(terminal)
    try:
        await until(lambda: "actor.Update" in mesh.running)
        os.close(master)
        gate.set()
        await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 0
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == STEPS


async def test_a_signal_that_the_caller_ignores_stays_ignored(
    recipe_file: Path, tmp_path: Path, mesh: FakeMesh
) -> None:
    gate = mesh.roles["actor"].gates["Update"] = asyncio.Event()
    process = await start("train", recipe_file, "--out", "run", folder=tmp_path, before=("nohup",))
    try:
        await until(lambda: "actor.Update" in mesh.running)
        process.send_signal(signal.SIGHUP)
        gate.set()
        await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert process.returncode == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("succeeded", STEPS)


async def test_unknown_role_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    code, _, errors = await rolemesh("serve", "actr", folder=tmp_path)
    assert code == 2
    assert "did you mean actor?" in errors


async def test_commands_on_no_run_say_so(tmp_path: Path) -> None:
    for arguments in (["status"], ["logs"], ["trace"], ["export", "run", "--to", "model"]):
        code, _, errors = await rolemesh(*arguments, folder=tmp_path)
        assert code == 2
        assert errors.startswith("error: ")
        assert "run" in errors


@pytest.mark.parametrize("arguments", [["status"], ["samples"], ["samples", "--best", "--worst"]])
async def test_what_reads_json_is_told_of_a_failure_in_json(
    arguments: list[str], tmp_path: Path
) -> None:
    code, output, errors = await rolemesh(*arguments, "--json", folder=tmp_path)
    told = json.loads(output)
    assert (told["type"], told["exit_code"], code) == ("error", 2, 2)
    assert errors == f"error: {told['text']}\n"
