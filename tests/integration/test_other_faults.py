"""Faults beside kills: processes that stand still, broken networks, full memory, full disks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from support import warm_processes
from support.fake_roles import until
from support.kill_plans import COMMON, Kill, Phase
from support.killed_runs import killed_run, kills_of
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.run_results import learnt, written
from support.services import wait_for_announcement
from support.tcp_proxy import TcpProxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

WAIT_S = 500
STEPS = 8
MIB = 2**20
NEEDS_MOUNTS = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0,
    reason="mounts a small file system, which takes root",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def recipe_of(model: Path, **changes: Any) -> dict[str, Any]:
    return tiny_recipe(
        model,
        run__steps=STEPS,
        run__evaluation={"num_prompts": 4, "every_steps": 3},
        run__checkpoint={"every_steps": 3, "keep": 9},
        run__recovery={"pause_s": 0.1},
        **changes,
    )


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = CliRun(
        recipe_of(model),
        tmp_path_factory.mktemp("undisturbed"),
    )
    try:
        assert run.wait(WAIT_S) == 0, run.output
    finally:
        run.close()
    return run.out


def assert_same(run: CliRun, undisturbed: Path) -> dict[str, Any]:
    """The same bits; returns the run's summary."""
    assert learnt(run.out) == learnt(undisturbed)
    assert written(run.out) == written(undisturbed)
    summary: dict[str, Any] = json.loads((run.out / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("succeeded", STEPS)
    return summary


def phase(name: str) -> Phase:
    return next(known for known in COMMON if known.name == name)


def test_a_role_that_is_stopped_for_seconds_only_delays(
    model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    plan = [
        Kill("actor", phase("update of the actor"), 0.0, 1, stop_s=3.0),
        Kill("critic", phase("cut of the critic"), 0.0, 3, stop_s=3.0),
    ]
    run = killed_run(recipe_of(model), tmp_path, plan, WAIT_S)
    assert len(kills_of(tmp_path)) == 2
    assert assert_same(run, undisturbed)["recoveries"] == []


def test_a_role_that_is_stopped_for_good_is_replaced(
    model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    plan = [
        Kill("critic", phase("update of the critic"), 0.0, 1, stop_s=0),
        Kill("reward", phase("sampling"), 0.0, 4, stop_s=0),
    ]
    # The process in front of a warm one would not pass SIGKILL on to one that stands still.
    run = killed_run(recipe_of(model), tmp_path, plan, WAIT_S, is_warm=False)
    recoveries = assert_same(run, undisturbed)["recoveries"]
    assert [found["restarted"] for found in recoveries] == [["critic"], ["reward"]]


# --- the network --------------------------------------------------------------------------


def start_critic(flags: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "rolemesh.services.critic", *flags],
        env={**os.environ, **warm_processes.services(), "PYTHONSAFEPATH": "1"},
        stdout=log,
        stderr=log,
    )


@asynccontextmanager
async def critic_behind_a_proxy(folder: Path) -> AsyncIterator[TcpProxy]:
    """A critic that others have started, which the coordinator reaches through a proxy alone."""
    announce = folder / "critic.json"
    flags = ("--host", "127.0.0.1", "--port", "0", "--announce", str(announce), "--threads", "1")
    with (folder / "critic.log").open("ab") as log:
        process = start_critic(flags, log)
    try:
        announced = await asyncio.to_thread(wait_for_announcement, process, announce)
        proxy = TcpProxy(int(announced["address"].rpartition(":")[2]))
        await proxy.start()
        try:
            yield proxy
        finally:
            proxy.resume()
            await proxy.cut()
    finally:
        process.kill()
        process.wait()


async def reset(proxy: TcpProxy) -> None:
    await proxy.cut()
    await asyncio.sleep(0.5)
    await proxy.start()


async def lose_answers(proxy: TcpProxy) -> None:
    proxy.answers_to_lose = 3
    await until(lambda: proxy.answers_to_lose == 0)


async def short_black_hole(proxy: TcpProxy) -> None:
    proxy.stall()
    await asyncio.sleep(3)
    proxy.resume()


async def long_black_hole(proxy: TcpProxy) -> None:
    """Longer than a connection may be silent: the service counts as lost, and is met again."""
    proxy.stall()
    await asyncio.sleep(60)
    await proxy.cut()
    proxy.resume()
    await proxy.start()


@pytest.mark.parametrize("fault", [reset, lose_answers, short_black_hole, long_black_hole])
async def test_a_network_that_breaks_changes_nothing(
    fault: Callable[[TcpProxy], Any], model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    async with critic_behind_a_proxy(tmp_path) as proxy:
        recipe = recipe_of(model)
        recipe["services"]["critic"] = {"address": proxy.address}
        run = CliRun(recipe, tmp_path)
        try:
            await until(lambda: len(run.metrics()) >= 2 or run.process.poll() is not None)
            await fault(proxy)
            assert await asyncio.to_thread(run.wait, WAIT_S) == 0, run.output
        finally:
            run.close()
    assert_same(run, undisturbed)


# --- room ---------------------------------------------------------------------------------


@NEEDS_MOUNTS
def test_without_room_for_cuts_the_run_goes_on_from_checkpoints(
    model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    # A slot of the tiny model takes 1.6 MB.
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    plan = [Kill("actor", phase("advantages"), 0.0, 4)]
    run = killed_run(
        recipe_of(model),
        tmp_path,
        plan,
        WAIT_S,
        is_warm=False,
        within=("unshare", "-m", "sh", "-c", script, "sh"),
    )
    assert "no more cuts are kept in memory" in run.stdout
    (recovered,) = assert_same(run, undisturbed)["recoveries"]
    # Steps 4 and more are made again from the checkpoint of step 3.
    assert recovered["lost_steps"] >= 1


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Mounts a file system in an empty folder; gives what changes its size."""

    def mount(num_bytes: int, *options: str) -> None:
        size = ",".join((f"size={num_bytes}", *options))
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], check=True)

    mount(num_bytes)
    try:
        yield lambda num_bytes: mount(num_bytes, "remount")
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@NEEDS_MOUNTS
def test_a_full_disk_ends_a_run_that_can_be_resumed(
    model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    # Logs, metrics and the store have room, but no checkpoint.
    with small_disk(out, 2 * MIB) as resize:
        run = CliRun(recipe_of(model), tmp_path)
        try:
            assert run.wait(WAIT_S) == 1, run.output
            # All steps are made, since the cuts do for a failure; the end of the run has none.
            for step in (3, 6):
                assert f"the checkpoint of step {step} is left out" in run.stdout, run.output
            assert f"checkpoint of step {STEPS} failed on" in run.stderr, run.output
            assert "[CHECKPOINT_CAPACITY]" in run.stderr
            assert not any(Path(file).is_file() for file in out.glob("checkpoints/**"))
        finally:
            run.kill()
        resize(64 * MIB)
        again = CliRun(recipe_of(model), tmp_path, "--resume", str(out))
        try:
            assert again.wait(WAIT_S) == 0, again.output
        finally:
            again.close()
        assert learnt(again.out) == learnt(undisturbed)
        last = (f"checkpoints/step-{STEPS:08}/", "model/")
        assert written(again.out) == {
            file: digest for file, digest in written(undisturbed).items() if file.startswith(last)
        }
