"""Reward functions in worker processes: files of users as they are, and every way to go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.outside_rows import reward_row, reward_rows
from support.tiny_images import noise, png
from support.worker_processes import worker_processes

from rolemesh.engine.images.prompt_images import data_url
from rolemesh.engine.sandbox.host import Sandbox, find_sandbox
from rolemesh.engine.specs import DropGroupSpec, PythonRewardSpec
from rolemesh.services.reward.outside.base import (
    Judgement,
    OutsideRewardError,
    RewardTimeoutError,
    current_step,
)
from rolemesh.services.reward.outside.functions.process import _checked
from rolemesh.services.reward.outside.functions.reward import FunctionReward

SUPPORT = Path(__file__).parents[1] / "support"
EXAMPLE = Path(__file__).parents[2] / "examples" / "reward_function_trl.py"
SANDBOX = find_sandbox("auto")
"""The one that this host has: what works and what fails is the same in it."""
FREE = Sandbox(kind="none", lacks="the test's function writes where it wants to")
NUM_LEAK_CALLS = 3000
LEAK_EACH = 100
"""Of these calls, every such one ends its worker."""
MOST_GROWTH_BYTES = 8 << 20
"""Noise of the allocator over thousands of calls; a leak of one batch a call would be more."""


@contextlib.asynccontextmanager
async def function(name: str, file: str = "trl_rewards.py", **spec: Any) -> AsyncIterator[Any]:
    reward = FunctionReward(
        "it", PythonRewardSpec(function=f"{SUPPORT / file}:{name}", **spec), SANDBOX
    )
    try:
        await reward.open()
        yield reward
    finally:
        await reward.close()


@contextlib.asynccontextmanager
async def hostile(**spec: Any) -> AsyncIterator[Any]:
    async with function("behave", "hostile_rewards.py", **spec) as reward:
        yield reward


async def failure(reward: FunctionReward, how: str) -> OutsideRewardError:
    """What the call fails with; the next one must work."""
    judgement = await reward.judge(reward_rows(how))
    assert judgement.rewards == [None]
    after = await reward.judge(reward_rows("fine"))
    assert after.rewards == [1.0]
    assert not after.failures
    return judgement.failures[0]


def rewards_of(judgement: Judgement) -> list[float | None]:
    assert not judgement.failures, judgement.failures
    return judgement.rewards


async def test_a_trl_file_works_unmodified() -> None:
    async with function("num_tokens") as reward:
        assert rewards_of(await reward.judge(reward_rows("ab", "", "abc"))) == [2.0, 0.0, 3.0]


async def test_a_trl_function_may_not_apply_to_a_row() -> None:
    rows = [
        reward_row("4", task="math"),
        reward_row("5", task="math"),
        reward_row("4", task="code"),
    ]
    async with function("sums") as reward:
        assert rewards_of(await reward.judge(rows)) == [1.0, 0.0, None]


async def test_conversations_reach_a_trl_function_as_messages() -> None:
    messages = [{"role": "user", "content": "hi"}]
    rows = [
        replace(reward_row(text), metadata={"prompt": messages})
        for text in ("<think>a</think><answer>b</answer>", "b")
    ]
    async with function("tagged") as reward:
        assert rewards_of(await reward.judge(rows)) == [1.0, 0.0]


async def test_an_async_trl_function_reports_and_knows_the_step() -> None:
    async with function("reporting") as reward:
        token = current_step.set(7)
        judgement = await reward.judge(reward_rows("ab", "abcd"))
        current_step.reset(token)
    assert rewards_of(judgement) == [9.0, 11.0]
    assert judgement.metrics["length"] == 3.0
    assert judgement.metrics["longest"] == 4.0


async def test_images_reach_the_functions_that_take_them_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "seeing.py"
    file.write_text(
        "def seeing(completions, images):\n"
        "    return [sum(one.width for one in row) for row in images]\n"
        "def blind(completions, **kwargs):\n"
        "    return [float('images' in kwargs) for _ in completions]\n"
    )
    wide = data_url(png(noise(width=5, height=3)))
    shown = ((wide, wide), (), (wide,))
    rows = [
        replace(row, images=images)
        for row, images in zip(reward_rows("a", "b", "c"), shown, strict=True)
    ]
    for name, takes, expected in (("seeing", True, [10.0, 0.0, 5.0]), ("blind", False, [0.0] * 3)):
        spec = PythonRewardSpec(function=f"{file}:{name}", batch_size=2)
        reward = FunctionReward("it", spec, SANDBOX)
        try:
            # It is not open: the first rows say what must be known.
            assert rewards_of(await reward.judge(rows)) == expected
            assert reward.takes_images is takes
        finally:
            await reward.close()


async def test_an_openrlhf_file_works_unmodified() -> None:
    async with function("reward_func", memory_mib=None) as reward:
        judgement = await reward.judge([reward_row("4", answer="4"), reward_row("5")])
    assert rewards_of(judgement) == [1.0, 1.0]
    assert judgement.metrics["scores"] == 1.0
    assert judgement.metrics["labelled"] == 0.5


async def test_a_verl_function_gives_parts_row_by_row(tmp_path: Path) -> None:
    file = tmp_path / "compute_score.py"
    file.write_text(
        "async def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if solution_str == 'none':\n"
        "        raise ValueError('no solution')\n"
        "    acc = solution_str == ground_truth\n"
        "    return {'score': acc - 0.5, 'acc': acc, 'pred': solution_str, **extra_info}\n"
    )
    spec = PythonRewardSpec(function=f"{file}:compute_score", batch_size=2)
    reward = FunctionReward("it", spec, SANDBOX)
    rows = [
        reward_row(text, answer="4", data_source="gsm8k", extra_info=extra)
        for text, extra in (("4", {"index": 7}), ("5", None), ("none", {}))
    ]
    judgement = await reward.judge(rows)
    bad = await reward.judge([reward_row("4", data_source="x", extra_info={"a b": 1})])
    await reward.close()
    assert judgement.rewards == [0.5, -0.5, None]
    assert judgement.parts == [{"acc": 1.0, "index": 7.0}, {"acc": 0.0}, {}]
    assert "no solution" in str(judgement.failures[2])
    assert "at row 0 has the part 'a b'; name it with 1 to 64 letters" in str(bad.failures[0])


async def test_the_example_works() -> None:
    spec = PythonRewardSpec(function=f"{EXAMPLE}:accuracy")
    reward = FunctionReward("it", spec, SANDBOX)
    judgement = await reward.judge([reward_row("it is 4", answer="4"), reward_row("5", answer="4")])
    await reward.close()
    assert rewards_of(judgement) == [1.0, 0.0]
    async with function("brevity", str(EXAMPLE)) as brevity:
        assert rewards_of(await brevity.judge(reward_rows("", "a"))) == [1.0, 0.5]


async def test_batches_go_to_as_many_processes_as_there_may_be() -> None:
    async with hostile(batch_size=1, concurrency=2) as reward:
        judgement = await reward.judge(reward_rows(*["pid"] * 6))
    assert 1 <= len(set(rewards_of(judgement))) <= 2
    assert judgement.metrics["queue_peak"] >= 1


async def test_a_function_that_raises_shows_its_own_traceback() -> None:
    async with hostile() as reward:
        text = str(await failure(reward, "raise"))
    assert "LookupError: no such thing" in text
    assert 'hostile_rewards.py", line' in text
    assert "worker.py" not in text


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("few", "0 entries for 1 completions"),
        ("nan", "at row 0 is nan"),
        ("text", "at row 0 is '1.0' of type str"),
        ("nested", r"at row 0 is \[1.0\] of type list"),
        ("none", "None of type NoneType"),
        ("large", "1000000 entries for 1 completions"),
        ("exit", "SystemExit: 3"),
        ("os_exit", "an exit with code 3"),
        ("crash", "SIGABRT"),
        ("memory", "MemoryError; the function wanted more than memory_mib"),
        ("print", "more than 1048576 bytes printed"),
        ("child", "an exit with code 4"),
    ],
)
async def test_a_function_that_goes_wrong_fails_its_rows_alone(how: str, found: str) -> None:
    async with hostile(memory_mib=512) as reward:
        error = await failure(reward, how)
    with pytest.raises(OutsideRewardError, match=found):
        raise error


async def test_a_function_that_hangs_is_ended_in_time() -> None:
    async with hostile(timeout_s=1.0) as reward:
        assert isinstance(await failure(reward, "hang"), RewardTimeoutError)


async def test_processor_time_is_bounded() -> None:
    async with hostile(cpu_s=1.0) as reward:
        assert "more than 1 s of processor time" in str(await failure(reward, "spin"))


async def test_a_worker_that_writes_garbage_is_not_believed() -> None:
    async with hostile(timeout_s=30.0) as reward:
        text = str(await failure(reward, "liar"))
    assert "announces 4294967295 bytes" in text


def test_a_number_that_no_float_holds_is_no_reward() -> None:
    with pytest.raises(ValueError, match="beyond those of float64"):
        _checked({"rewards": [10**400], "metrics": {}}, 1)


async def test_a_reward_that_answers_no_call_is_not_taken_for_the_next_one() -> None:
    async with hostile(timeout_s=30.0) as reward:
        text = str(await failure(reward, "twice"))
    assert "the answer to another call" in text


async def test_processes_that_a_function_started_end_with_its_worker(tmp_path: Path) -> None:
    file = tmp_path / "parent.py"
    file.write_text(
        "import os, subprocess, sys\n"
        "def f(completions):\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "    os._exit(4)\n"
    )
    reward = FunctionReward("it", PythonRewardSpec(function=f"{file}:f"), FREE)
    assert (await reward.judge(reward_rows("a"))).failures
    await reward.close()
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        # An init that reaps nothing leaves it as a zombie.
        for _ in range(1000):
            if child.status() == psutil.STATUS_ZOMBIE:
                break
            await asyncio.sleep(0.01)
        else:
            pytest.fail("it lives on")


async def test_one_bad_batch_leaves_the_others_alone() -> None:
    async with hostile(batch_size=1, on_failure=DropGroupSpec()) as reward:
        judgement = await reward.judge(reward_rows("fine", "os_exit", "fine"))
    assert judgement.rewards == [1.0, None, 1.0]
    assert list(judgement.failures) == [1]
    assert judgement.metrics["errors"] == 1


async def test_secrets_of_the_service_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("GIVEN_TOKEN", "y")
    async with hostile(environment=("GIVEN_TOKEN",)) as reward:
        assert rewards_of(await reward.judge(reward_rows("environment"))) == [2.0]


async def test_what_a_function_prints_is_logged_up_to_a_bound(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "talker.py"
    file.write_text(
        "def talk(completions):\n"
        "    print('hello' + chr(27) + '[31m')\n"
        "    print('y' * 100_000)\n"
        "    return [1.0] * len(completions)\n"
    )
    reward = FunctionReward("it", PythonRewardSpec(function=f"{file}:talk"), SANDBOX)
    with caplog.at_level(logging.INFO):
        rewards_of(await reward.judge(reward_rows("a")))
    await reward.close()
    assert "prints: hello [31m" in caplog.text
    assert "more in this call, which is not logged" in caplog.text
    assert caplog.text.count("y") < 20_000


@pytest.mark.parametrize(
    ("source", "name", "found"),
    [
        ("import no_such_module\n", "f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def g(completions): ...\n", "f", "has no 'f'"),
        ("def f(completions):\n  return [\n", "f", "SyntaxError"),
        ("def f(prompts): ...\n", "f", "do not tell how it is called"),
        ("f = 3\n", "f", "name a function"),
        ("import sys; sys.exit(5)\n", "f", "an exit with code 5"),
        ("import os; os.kill(os.getpid(), 9)\n", "f", "SIGKILL"),
    ],
)
async def test_what_cannot_be_imported_shows_when_it_is_opened(
    tmp_path: Path, source: str, name: str, found: str
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(source)
    reward = FunctionReward("it", PythonRewardSpec(function=f"{file}:{name}"), SANDBOX)
    with pytest.raises(OutsideRewardError, match=found):
        await reward.open()
    await reward.close()


@pytest.mark.parametrize(("policy", "num_calls"), [("fail", 1), ("drop_group", 3)])
async def test_a_failure_that_ends_the_step_ends_the_calls(
    tmp_path: Path, policy: str, num_calls: int
) -> None:
    log, file = tmp_path / "log", tmp_path / "broken.py"
    file.write_text(
        f"def f(completions):\n  open({str(log)!r}, 'a').write('called ')\n  raise KeyError\n"
    )
    spec = PythonRewardSpec.model_validate(
        {"function": f"{file}:f", "batch_size": 1, "on_failure": {"type": policy}}
    )
    reward = FunctionReward("it", spec, FREE)
    judged = await reward.judge(reward_rows("a", "b", "c"))
    await reward.close()
    assert len(judged.failures) == 3
    assert log.read_text().split() == ["called"] * num_calls


async def test_closing_ends_a_call_in_flight_with_a_reason(tmp_path: Path) -> None:
    called, file = tmp_path / "called", tmp_path / "slow.py"
    file.write_text(
        "import pathlib, time\n"
        f"def f(completions): pathlib.Path({str(called)!r}).touch(); time.sleep(600)\n"
    )
    reward = FunctionReward("it", PythonRewardSpec(function=f"{file}:f", timeout_s=600), FREE)
    judging = asyncio.create_task(reward.judge(reward_rows("a")))
    while not called.exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await reward.close()
    assert "its service ends" in str((await judging).failures[0])


async def test_a_file_may_import_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 2.5\n")
    # A neighbour shadows nothing.
    (tmp_path / "json.py").write_text("raise ImportError('shadowed')\n")
    file = tmp_path / "main.py"
    file.write_text(
        "import json\nfrom neighbour import VALUE\n"
        "def f(completions): return [VALUE] * len(completions)\n"
    )
    reward = FunctionReward("it", PythonRewardSpec(function=f"{file}:f"), SANDBOX)
    assert rewards_of(await reward.judge(reward_rows("a"))) == [2.5]
    await reward.close()


async def test_a_worker_that_ended_between_two_calls_is_replaced() -> None:
    async with hostile() as reward:
        assert rewards_of(await reward.judge(reward_rows("fine"))) == [1.0]
        (first,) = worker_processes()
        first.kill()
        await asyncio.to_thread(os.waitid, os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
        assert rewards_of(await reward.judge(reward_rows("fine"))) == [1.0]
        (second,) = worker_processes()
        assert second.pid != first.pid


async def test_a_cancelled_call_ends_its_worker() -> None:
    async with hostile() as reward:
        before = worker_processes()
        assert len(before) == 1
        call = asyncio.create_task(reward.judge(reward_rows("hang")))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not any(child.is_running() for child in before)
        assert rewards_of(await reward.judge(reward_rows("fine"))) == [1.0]


def test_workers_end_with_their_service() -> None:
    """Killed without a chance to clean up, in the middle of a call that keeps the interpreter."""
    program = (
        "import asyncio, psutil\n"
        "from support.outside_rows import reward_rows\n"
        "from rolemesh.engine.sandbox.host import find_sandbox\n"
        "from rolemesh.engine.specs import PythonRewardSpec\n"
        "from rolemesh.services.reward.outside.functions.reward import FunctionReward\n"
        "async def main():\n"
        f"    name = {str(SUPPORT / 'hostile_rewards.py')!r} + ':behave'\n"
        "    reward = FunctionReward('it', PythonRewardSpec(function=name), find_sandbox('auto'))\n"
        "    await reward.judge(reward_rows('fine'))\n"
        "    print(*[c.pid for c in psutil.Process().children(recursive=True)], flush=True)\n"
        "    await reward.judge(reward_rows('spin'))\n"
        "asyncio.run(main())\n"
    )
    service = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT.parent), *sys.path])},
    )
    assert service.stdout is not None
    with service.stdout:
        workers = [psutil.Process(int(pid)) for pid in service.stdout.readline().split()]
    assert workers
    service.send_signal(signal.SIGKILL)
    service.wait(30)
    for worker in workers:
        worker.wait(30)


@pytest.mark.slow
async def test_thousands_of_calls_with_restarts_leak_nothing() -> None:
    this = psutil.Process()
    async with hostile(memory_mib=None) as reward:
        rows = reward_rows("fine", *["some text"] * 63)
        for _ in range(200):
            await reward.judge(rows)
        files, memory = this.num_fds(), this.memory_info().rss
        threads, tasks = this.num_threads(), len(asyncio.all_tasks())
        for number in range(NUM_LEAK_CALLS):
            if number % LEAK_EACH == 0:
                judgement = await reward.judge(reward_rows("os_exit"))
                assert judgement.failures
            assert rewards_of(await reward.judge(rows)) == [1.0] * 64
        assert this.num_fds() == files
        assert len(asyncio.all_tasks()) == tasks
        assert len(worker_processes()) == 1
        # Waiting for ends of processes takes threads of the loop's pool, which has a bound.
        assert this.num_threads() <= threads + 8
        assert this.memory_info().rss - memory < MOST_GROWTH_BYTES
    assert worker_processes() == []
