"""Processes of services: found dead at once, never left behind. Children are tiny programs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.fake_roles import fake_recipe, until

from rolemesh.coordinator.run.services.commands import ServiceCommand, service_commands
from rolemesh.coordinator.run.services.launch import Launcher, LaunchError, ServiceExit, last_lines

ANNOUNCE = """
import json, os, sys, time
path = sys.argv[1]
def announce():
    with open(path + ".new", "w") as file:
        json.dump({"address": "127.0.0.1:" + str(os.getpid()), "pid": os.getpid()}, file)
    os.replace(path + ".new", path)
"""
SERVE = ANNOUNCE + "announce(); time.sleep(600)"
FAIL_AFTER_START = (
    ANNOUNCE + "announce(); time.sleep(0.1); print('line one', flush=True); sys.exit('the cause')"
)
FAIL_BEFORE_START = ANNOUNCE + "raise RuntimeError('no such model')"
DEAF = (
    ANNOUNCE
    + "import signal; signal.signal(signal.SIGTERM, lambda *_: None); announce()\n"
    + ("while True: time.sleep(1)")
)
WITH_GRANDCHILD = ANNOUNCE + (
    "import subprocess; child = subprocess.Popen([sys.executable, '-c', "
    "'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'])\n"
    "print(child.pid, flush=True); announce(); time.sleep(600)"
)


def running(program: str, **by_role: str) -> object:
    def make(role: str, announce: Path) -> ServiceCommand:
        code = by_role.get(role, program)
        return ServiceCommand(
            arguments=[sys.executable, "-c", code, str(announce)], environment={"MARK": role}
        )

    return make


def launcher(
    folder: Path,
    *roles: str,
    program: str = SERVE,
    on_again: Callable[[ServiceExit], None] | None = None,
    **by_role: str,
) -> Launcher:
    return Launcher(roles, running(program, **by_role), folder, on_again)  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pid: int) -> None:
    """Returns when the process has ended; the test's own timeout bounds the wait."""
    while is_alive(pid):
        time.sleep(0.02)


async def first_exit(subject: Launcher) -> ServiceExit:
    found: asyncio.Future[ServiceExit] = asyncio.get_running_loop().create_future()
    subject.on_exit = found.set_result
    return await found


async def test_services_are_started_and_end_with_the_launcher(tmp_path: Path) -> None:
    async with launcher(tmp_path, "actor", "critic") as subject:
        addresses = await subject.start()
        pids = subject.pids
        assert addresses == {role: f"127.0.0.1:{pid}" for role, pid in pids.items()}
        assert psutil.Process(pids["actor"]).environ()["MARK"] == "actor"
        # Not of our group: Ctrl-C must not reach them.
        assert os.getpgid(pids["actor"]) == pids["actor"]
    assert not any(is_alive(pid) for pid in pids.values())


async def test_killed_service_is_named_with_its_signal(tmp_path: Path) -> None:
    async with launcher(tmp_path, "actor", "critic") as subject:
        await subject.start()
        os.kill(subject.pids["critic"], signal.SIGKILL)
        found = await first_exit(subject)
    assert (found.role, found.num_ranks, found.signal_number) == ("critic", 1, signal.SIGKILL)
    assert f"critic rank 0 (pid {found.pid}) was killed by signal 9 (SIGKILL)" in found.reason


async def test_failed_service_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    async with launcher(tmp_path, "reward", program=FAIL_AFTER_START) as subject:
        await subject.start()
        found = await first_exit(subject)
    assert found.exit_code == 1
    assert found.last_lines == ("line one", "the cause")
    assert "ended with exit code 1" in found.reason
    assert found.reason.endswith("| line one\n  | the cause")
    assert str(tmp_path / "reward.log") in found.reason


async def test_an_exit_before_anybody_asked_is_told_afterwards(tmp_path: Path) -> None:
    async with launcher(tmp_path, "reward", program=FAIL_AFTER_START) as subject:
        await subject.start()
        await asyncio.to_thread(wait_until_gone, subject.pids["reward"])
        assert (await first_exit(subject)).role == "reward"


async def test_service_that_fails_while_starting_is_a_launch_error(tmp_path: Path) -> None:
    told: list[ServiceExit] = []
    subject = launcher(tmp_path, "actor", "critic", critic=FAIL_BEFORE_START, on_again=told.append)
    with pytest.raises(LaunchError, match="while starting: critic rank 0") as caught:
        async with subject:
            await subject.start()
    assert "RuntimeError: no such model" in str(caught.value)
    assert told == []
    assert not any(is_alive(pid) for pid in subject.pids.values())


KILLED_AT_START = "import signal; os.kill(os.getpid(), signal.SIGKILL)"
ENDED_BY_ITS_AGENT = "sys.exit(128 + 9)"


def many_times(folder: Path, number: int, death: str) -> str:
    """A program that dies at its first starts."""
    marks = str(folder / "starts")
    count = f"open({marks!r}, 'a').write('.'); number = len(open({marks!r}).read())\n"
    return ANNOUNCE + count + f"if number <= {number}: {death}\nannounce(); time.sleep(600)"


@pytest.mark.parametrize("death", [KILLED_AT_START, ENDED_BY_ITS_AGENT])
async def test_service_that_is_killed_while_it_starts_is_started_once_more(
    tmp_path: Path, death: str
) -> None:
    told: list[ServiceExit] = []
    program = many_times(tmp_path, 1, death)
    async with launcher(
        tmp_path, "actor", "critic", critic=program, on_again=told.append
    ) as subject:
        addresses = await subject.start()
        assert addresses == {role: f"127.0.0.1:{pid}" for role, pid in subject.pids.items()}
        assert [end.role for end in told] == ["critic"]
        # From here on the run is told.
        os.kill(subject.pids["critic"], signal.SIGKILL)
        assert (await first_exit(subject)).role == "critic"


@pytest.mark.parametrize(("starts", "is_told"), [(2, True), (1, False)])
async def test_a_second_kill_at_the_start_is_a_launch_error_as_is_one_that_nobody_survives(
    tmp_path: Path, starts: int, is_told: bool
) -> None:
    program = many_times(tmp_path, starts, KILLED_AT_START)
    told: list[ServiceExit] = []
    on_again = told.append if is_told else None
    async with launcher(tmp_path, "critic", program=program, on_again=on_again) as subject:
        with pytest.raises(LaunchError, match=r"while starting: critic rank 0 .* by signal 9"):
            await subject.start()
    assert len(told) == starts - 1


async def test_silent_service_is_a_launch_error(tmp_path: Path) -> None:
    silent = ANNOUNCE + "time.sleep(600)"
    async with launcher(tmp_path, "actor", "critic", critic=silent) as subject:
        with pytest.raises(LaunchError, match=r"not ready after 2 s: critic \(pid"):
            await subject.start(deadline_s=2)


async def test_deaf_service_is_killed(tmp_path: Path) -> None:
    async with launcher(tmp_path, "actor", program=DEAF) as subject:
        subject.close_grace_s = 0.1
        await subject.start()
    assert not is_alive(subject.pids["actor"])


async def test_what_a_service_started_ends_with_it(tmp_path: Path) -> None:
    async with launcher(tmp_path, "actor", program=WITH_GRANDCHILD) as subject:
        await subject.start()
        grandchild = int((tmp_path / "actor.log").read_text())
        assert is_alive(grandchild)
    await asyncio.to_thread(wait_until_gone, grandchild)


async def test_no_exit_is_reported_for_services_that_were_told_to_end(tmp_path: Path) -> None:
    told: list[ServiceExit] = []
    async with launcher(tmp_path, "actor") as subject:
        await subject.start()
        subject.on_exit = told.append
    assert told == []


async def test_a_dead_service_is_started_again_with_its_command_and_log(tmp_path: Path) -> None:
    program = SERVE.replace("announce();", "print(os.environ['MARK'], flush=True); announce();")
    told: list[ServiceExit] = []
    async with launcher(tmp_path, "actor", "critic", program=program) as subject:
        old = await subject.start()
        dead, other = subject.pids["actor"], subject.pids["critic"]
        subject.on_exit = told.append
        os.kill(dead, signal.SIGKILL)
        await until(lambda: len(told) == 1)
        address = await subject.restart("actor")
        assert address == f"127.0.0.1:{subject.pids['actor']}" != old["actor"]
        assert subject.pids["critic"] == other
        assert (tmp_path / "actor.log").read_text() == "actor\nactor\n"
        # It counts as any other now, and what was told before is not told again.
        later: list[ServiceExit] = []
        subject.on_exit = later.append
        assert later == []
        os.kill(subject.pids["actor"], signal.SIGKILL)
        await until(lambda: len(later) == 1)
        await subject.restart("actor")
        pids = [dead, other, *subject.pids.values()]
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_living_service_is_killed_with_its_group_and_started_again(
    tmp_path: Path, is_stopped: bool
) -> None:
    told: list[ServiceExit] = []
    async with launcher(tmp_path, "actor", program=WITH_GRANDCHILD) as subject:
        await subject.start()
        subject.on_exit = told.append
        old, grandchild = subject.pids["actor"], int((tmp_path / "actor.log").read_text())
        if is_stopped:
            os.kill(old, signal.SIGSTOP)
        address = await subject.restart("actor")
        assert address == f"127.0.0.1:{subject.pids['actor']}"
        assert subject.pids["actor"] != old
        assert not is_alive(old)
        assert not is_alive(grandchild)
        assert told == []


async def test_what_a_dead_service_left_running_is_ended_before_the_new_one_starts(
    tmp_path: Path,
) -> None:
    async with launcher(tmp_path, "actor", program=WITH_GRANDCHILD) as subject:
        await subject.start()
        grandchild = int((tmp_path / "actor.log").read_text())
        os.kill(subject.pids["actor"], signal.SIGKILL)
        await first_exit(subject)
        assert is_alive(grandchild)
        await subject.restart("actor")
        assert not is_alive(grandchild)


async def test_a_service_that_does_not_start_again_is_a_launch_error_and_may_be_tried_again(
    tmp_path: Path,
) -> None:
    # What it does is said by a file, anew at each start.
    program = ANNOUNCE + f"exec(open({str(tmp_path / 'program')!r}).read())"
    (tmp_path / "program").write_text("announce(); time.sleep(600)")
    told: list[ServiceExit] = []
    async with launcher(tmp_path, "actor", "critic", program=program) as subject:
        await subject.start()
        subject.on_exit = told.append
        (tmp_path / "program").write_text("raise RuntimeError('no memory')")
        with pytest.raises(LaunchError, match="while starting: actor rank 0") as caught:
            await subject.restart("actor")
        assert "RuntimeError: no memory" in str(caught.value)
        (tmp_path / "program").write_text("time.sleep(600)")
        with pytest.raises(LaunchError, match=r"not ready after 1 s: actor \(pid"):
            await subject.restart("actor", deadline_s=1)
        assert "actor" not in subject.pids
        (tmp_path / "program").write_text("announce(); time.sleep(600)")
        assert (await subject.restart("actor")).endswith(str(subject.pids["actor"]))
        assert told == []
        with pytest.raises(ValueError, match=r"'reward' cannot be started again: .* actor, critic"):
            await subject.restart("reward")


PARENT = """
import asyncio, sys, time
from pathlib import Path
from rolemesh.coordinator.run.services.commands import ServiceCommand
from rolemesh.coordinator.run.services.launch import Launcher
make = lambda role, announce: ServiceCommand(
    arguments=[sys.executable, "-c", sys.argv[2], str(announce)], environment={})
async def main():
    launcher = Launcher(["actor", "critic"], make, Path(sys.argv[1]))
    await launcher.start()
    print(*launcher.pids.values(), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_services_do_not_outlive_a_killed_coordinator(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), SERVE], stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdout is not None
            pids = [int(word) for word in parent.stdout.readline().split()]
            assert len(pids) == 2
            assert all(is_alive(pid) for pid in pids)
            parent.kill()
            parent.wait()
            for pid in pids:
                wait_until_gone(pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                parent.kill()


def test_last_lines_are_those_that_say_something(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert last_lines(log) == ()
    log.write_text("first\n" * 10_000 + "one\n\n  two\n\n")
    assert last_lines(log, 3) == ("first", "one", "  two")


async def test_a_service_gets_what_it_needs_of_the_environment_and_what_the_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = ("ROLEMESH_API_TOKEN", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "VLLM_API_KEY", "MINE")
    secret = (*secret, "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT")
    recipe_fields = ("ROLEMESH_TRACING__ENDPOINT",)
    needed = (
        *("PATH", "LC_ALL", "NCCL_DEBUG", "HF_HOME", "TOKENIZERS_PARALLELISM"),
        *("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"),
    )
    ours = ("ROLEMESH_SERVICE__LOG_LEVEL", "ROLEMESH_KERNELS")
    named = ("MY_TOOL_KEY", "JUDGE_TOKEN", "FOR_FUNCTIONS")
    for name in (*secret, *recipe_fields, *needed, *ours, *named):
        monkeypatch.setenv(name, os.environ.get(name, name))
    judge = {"type": "openrlhf", "urls": "https://h/get_reward", "token_variable": "JUDGE_TOKEN"}
    mine = {"type": "python", "function": "mine.py:judge", "environment": ["FOR_FUNCTIONS"]}
    recipe = fake_recipe(
        services={"actor": {"variables": ["MY_TOOL_KEY"]}},
        reward=[{"source": judge}, {"source": mine, "name": "mine"}],
    )

    def make(service: str, announce: Path) -> ServiceCommand:
        told = json_of_environment(announce)
        environment = service_commands(recipe, tmp_path)(service, announce).environment
        return ServiceCommand(arguments=[sys.executable, "-c", told], environment=environment)

    async with Launcher(("actor", "reward"), make, tmp_path) as subject:
        await subject.start()
        found = {
            role: set(json.loads((tmp_path / f"{role}.log").read_text()))
            for role in ("actor", "reward")
        }
    for role, own in (("actor", named[:1]), ("reward", named[1:])):
        asked = {*secret, *recipe_fields, *needed, *ours, *named}
        assert found[role] & asked == {*needed, *ours, *own}


def json_of_environment(announce: Path) -> str:
    """A program that prints the names of its variables and then serves."""
    names = "import json, os; print(json.dumps(list(os.environ)), flush=True)\n"
    return names + f"import sys; sys.argv = ['', {str(announce)!r}]\n" + SERVE
