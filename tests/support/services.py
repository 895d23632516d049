"""A small real role, in this process or in one of its own, for tests of the runtime.

`python -m` cannot reach this file from a child, so `spawn_service` hands its path to the child.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import grpc
import torch

from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.layout.ranks import HybridLayout
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import LayoutSpec, RoleSpec
from rolemesh.rpc.experience.references import row_tokens
from rolemesh.services.runtime.calls.role import InitializeResult, ProgressCallback, Role
from rolemesh.services.runtime.calls.runtime import Call, Runtime
from rolemesh.services.runtime.process import run_service
from rolemesh.services.runtime.ranks import face
from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.services.runtime.service_server import ServiceServer
from rolemesh.v1 import experience_pb2, operation_pb2, value_pb2, value_pb2_grpc

START_TIMEOUT_S = 60.0
"""Importing torch on a busy machine takes a while."""


class ToySpec(RoleSpec):
    """Spec of the toy role."""

    behaviour: str = "sum"
    """ "sum", "raise", "slow", "deaf" (slow, without progress), "hold" (deaf, and no other thread
    of the process runs Python), "nan", "produce" or "meet" (ranks wait for each other)."""
    num_rows: int = 4
    """Rows that "produce" makes."""
    seconds: float = 0.2
    """How long "slow", "deaf" and "hold" work."""
    failing_rank: int = -1
    """Raises instead of what the others do."""
    quick_rank: int = -1
    """Works for no time."""
    layout: LayoutSpec = LayoutSpec()

    def rank_layout(self) -> HybridLayout:
        return HybridLayout(self.layout.layout())


class ToyRole(Role):
    """Serves ValueService: values[t] = token + 1, or whatever its behaviour asks for."""

    name: ClassVar[str] = "toy"
    spec_class = ToySpec

    def __init__(self) -> None:
        self.spec = ToySpec()
        self.num_runs = 0
        self.is_closed = False
        self.mesh = RankMesh.single()

    def initialize(
        self, spec: ToySpec, run_seed: int, progress: ProgressCallback, mesh: RankMesh
    ) -> InitializeResult:
        progress("load", 1, 1)
        self.spec = spec
        self.mesh = mesh
        return InitializeResult(policy_version=7, num_parameters=3, facts={"seed": str(run_seed)})

    def register(self, server: grpc.aio.Server, runtime: Runtime) -> list[str]:
        value_pb2_grpc.add_ValueServiceServicer_to_server(ToyValues(self, runtime), server)
        return ["rolemesh.v1.ValueService"]

    def policy_version(self) -> int:
        return 7

    def sleep(self) -> int:
        return 11

    def wake(self) -> int:
        return 12

    def close(self) -> None:
        self.is_closed = True

    def work(self, batch: Experience | None, progress: ProgressCallback) -> Experience:
        self.num_runs += 1
        if self.spec.behaviour == "raise" or self.spec.failing_rank == self.mesh.rank:
            try:
                _ = 1 / 0
            except ZeroDivisionError as error:
                raise RuntimeError("the model is broken") from error
        if self.spec.behaviour == "meet":
            torch.distributed.barrier(self.mesh.world.process_group)
        if self.spec.behaviour == "deaf":
            time.sleep(self.spec.seconds)
        if self.spec.behaviour == "hold":
            ctypes.PyDLL(None).usleep(int(1e6 * self.spec.seconds))
        if self.spec.behaviour == "slow" and self.spec.quick_rank != self.mesh.rank:
            started = time.monotonic()
            while (elapsed := time.monotonic() - started) < self.spec.seconds:
                progress("slow", int(1000 * elapsed), int(1000 * self.spec.seconds))
                time.sleep(0.02)
        if batch is None:
            return make_experience(self.spec.num_rows, seed=5)
        tokens = batch["tokens"]
        return Experience(
            {"values": Column(ColumnKind.SEQUENCE, tokens.values.float() + 1, tokens.offsets)}
        )


class ToyValues(value_pb2_grpc.ValueServiceServicer):
    """ComputeValues over the toy role; without an experience it produces one."""

    def __init__(self, role: ToyRole, runtime: Runtime) -> None:
        self._role = role
        self._runtime = runtime

    def ComputeValues(
        self, request: value_pb2.ComputeValuesRequest, context: Any
    ) -> AsyncIterator[value_pb2.ComputeValuesResponse]:
        async def work(call: Call) -> experience_pb2.ExperienceResult:
            batch = None
            if request.HasField("experience"):
                share = self._runtime.share("3D_PROTO", row_tokens(request.experience))
                batch = await self._runtime.pull(
                    request.experience, ["tokens"], call, rows=share.rows
                )
            else:
                share = self._runtime.share("3D_ALL_MICRO_DP", [1] * self._role.spec.num_rows)
            produced = await call.compute(self._role.work, batch, call.progress)
            if batch is None:
                produced = produced.select(torch.tensor(share.rows, dtype=torch.int64))
            metric = float("nan") if self._role.spec.behaviour == "nan" else 1.5
            return experience_pb2.ExperienceResult(
                experience=self._runtime.publish(request.key, produced, share=share),
                report=call.report(
                    {"toy": metric}, (batch or produced).num_tokens if share.counts else 0
                ),
            )

        return self._runtime.keyed(request, value_pb2.ComputeValuesResponse, work)


def make_experience(num_rows: int, *, seed: int = 0, longest: int = 40) -> Experience:
    """A ragged batch of every column kind; some rows have no completion."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, longest, (num_rows,), generator=generator)
    completions = torch.randint(0, longest, (num_rows,), generator=generator)
    completions[::3] = 0
    rows = [torch.randint(0, 1000, (int(n),), generator=generator) for n in prompts + completions]
    floats = [torch.randn(int(n), generator=generator) for n in completions]
    return Experience(
        {
            "tokens": Column.ragged(ColumnKind.SEQUENCE, rows, torch.int64),
            "prompt_lengths": Column(ColumnKind.ROW, prompts),
            "logprobs": Column.ragged(ColumnKind.COMPLETION, floats, torch.float32),
            "loss_mask": Column.ragged(ColumnKind.COMPLETION, [f > 0 for f in floats], torch.bool),
            "half": Column.ragged(ColumnKind.COMPLETION, floats, torch.bfloat16),
            "prompt_text": Column.text(
                [f"row {row} " + "\u00e4" * (row % 5) for row in range(num_rows)]
            ),
        }
    )


def assert_same(left: Experience, right: Experience) -> None:
    """Bit for bit."""
    assert list(left.columns) == list(right.columns)
    for name, column in left.columns.items():
        other = right[name]
        assert column.kind is other.kind
        assert column.values.dtype is other.values.dtype
        assert torch.equal(column.values, other.values), name
        if column.offsets is None:
            assert other.offsets is None
        else:
            assert other.offsets is not None
            assert torch.equal(column.offsets, other.offsets), name


def operation_key(
    operation: str = "toy.work",
    *,
    step: int = 0,
    epoch: int = 1,
    sequence: int = 0,
    run_id: str = "run",
) -> operation_pb2.OperationKey:
    """A key of the test run."""
    return operation_pb2.OperationKey(
        run_id=run_id, fencing_epoch=epoch, step=step, operation=operation, sequence=sequence
    )


@asynccontextmanager
async def serving(
    role: Role | None = None, *more_roles: Role, **settings: Any
) -> AsyncIterator[ServiceServer]:
    """A role on the test's own loop, or several for as many runs; drained afterwards."""
    role = ToyRole() if role is None else role
    everything = {"folders": ["/"], "code_roots": ["/"], "runs": 1 + len(more_roles)}
    config = ServiceConfig(role=role.name, **(everything | settings))
    server = ServiceServer(role, config, *more_roles)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(work_timeout_s=5.0)


@dataclass
class ServiceProcess:
    """A service in a process of its own, or behind one; see support.warm_processes."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path
    pid: int
    """Of the service itself."""

    def end(self) -> int:
        """Kills it if it still runs; returns the exit code."""
        if self.process.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.process.wait(30)


TOY_SCRIPT = Path(__file__).resolve()
SETTLE_VARIABLE = "TOY_SETTLE_S"
"""Of a toy service's environment: seconds for `face.SETTLE_S`, so that a test of ranks that never
settle waits no longer."""


def service_command(*flags: str, script: Path = TOY_SCRIPT) -> list[str]:
    """The command line of a toy service."""
    return [sys.executable, str(script), *flags]


def spawn_service(directory: Path, *flags: str, script: Path = TOY_SCRIPT) -> ServiceProcess:
    """Starts a toy service from the warm process and waits until it announces itself."""
    # Imported here: as a script this file finds nothing of the tests.
    from support import warm_processes

    announce = directory / "announce.json"
    announce.unlink(missing_ok=True)
    process = subprocess.Popen(
        service_command(
            *("--announce", str(announce), "--log-directory", str(directory), *flags), script=script
        ),
        env={**os.environ, **warm_processes.services()},
        stderr=subprocess.DEVNULL,
    )
    announced = wait_for_announcement(process, announce)
    pid = warm_processes.forked(process.pid)
    return ServiceProcess(process, announced["address"], directory / "toy.log", pid)


def wait_for_announcement(
    process: subprocess.Popen[bytes], announce: Path, timeout_s: float = START_TIMEOUT_S
) -> dict[str, Any]:
    """Returns what the service announced; fails when it ends before."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if announce.exists():
            announced: dict[str, Any] = json.loads(announce.read_text())
            return announced
        assert process.poll() is None, f"the service ended with {process.returncode}"
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"the service did not start within {timeout_s} s")


def segments_of(pid: int) -> list[str]:
    """Shared memory files of a process."""
    return sorted(path.name for path in Path("/dev/shm").glob(f"rolemesh-{pid}-*"))


def main(arguments: Sequence[str]) -> int:
    if settle_s := os.environ.get(SETTLE_VARIABLE):
        face.SETTLE_S = float(settle_s)
    return run_service(ToyRole.name, ToyRole, arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
