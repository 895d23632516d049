"""Tests that pools without devices get the GPUs of the host, and that a CPU is never silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolemesh.coordinator.commands.findings.placing import (
    load_placed,
    pools_on_cpu,
    start_cautions,
)
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks import start_checks
from rolemesh.coordinator.run.services import host_gpus as host_gpus_module
from rolemesh.coordinator.run.services.host_gpus import GPU_BYTES, HostGpus, host_gpus

RECIPE = """
run: {name: placed, steps: 1, prompts_per_step: 8}
algorithm: {type: grpo, sampling: {samples_per_prompt: 2}}
actor:
  model: {path: .models/none}
  rollout: {type: vllm}
  data: {type: jsonl, path: data.jsonl}
reference: {model: {path: .models/none}}
reward: {source: {type: arithmetic}}
"""
SERVICES = dict.fromkeys(("actor", "reference", "reward"))


def placed(tmp_path: Path, pools: str, count: int) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE + pools)
    return load_placed([path], gpus(count))


def gpus(count: int) -> HostGpus:
    return HostGpus(count=count, name="h100", bytes_each=GPU_BYTES["h100"])


def devices(recipe: Recipe) -> dict[str, tuple[str, ...]]:
    return {role: pool.devices for pool in recipe.pools.values() for role in pool.roles}


def test_a_recipe_without_pools_takes_all_gpus(tmp_path: Path) -> None:
    found = placed(tmp_path, "", 4)
    assert devices(found) == {
        "actor": ("cuda:0", "cuda:1"),
        "reference": ("cuda:2", "cuda:3"),
        "reward": ("cpu",),
    }
    assert found.layout("actor").dp == found.layout("reference").dp == 2
    assert set(devices(placed(tmp_path, "", 0)).values()) == {("cpu",)}


def test_pools_that_name_devices_stay_as_they_are(tmp_path: Path) -> None:
    pools = "pools: {all: {devices: [cpu], roles: [actor, reference, reward]}}"
    assert set(devices(placed(tmp_path, pools, 4)).values()) == {("cpu",)}


def test_pools_without_devices_share_what_is_left(tmp_path: Path) -> None:
    pools = (
        "pools: {a: {devices: ['cuda:0'], roles: [actor]}, b: {roles: [reference]}, "
        "c: {roles: [reward]}}"
    )
    assert devices(placed(tmp_path, pools, 2)) == {
        "actor": ("cuda:0",),
        "reference": ("cuda:1",),
        "reward": ("cpu",),
    }
    with pytest.raises(RecipeError, match=r"pools\.b names no devices and wants 1 GPUs, but 0"):
        placed(tmp_path, pools, 1)


def test_a_cpu_on_a_host_with_gpus_is_told(tmp_path: Path) -> None:
    pools = "pools: {all: {devices: [cpu], roles: [actor, reference, reward]}}"
    on_cpu = placed(tmp_path, pools, 2)
    (caution,) = start_cautions(on_cpu, gpus(2), SERVICES)
    assert "2 x h100" in caution.text
    assert "pools.all" in caution.text
    (caution,) = start_cautions(on_cpu, HostGpus(unusable="torch is for the CPU"), SERVICES)
    assert "torch is for the CPU" in caution.text
    assert list(start_cautions(on_cpu, HostGpus(), SERVICES)) == []
    elsewhere = dict.fromkeys(SERVICES, "10.0.0.7:5000")
    assert list(start_cautions(on_cpu, gpus(2), elsewhere)) == []
    assert pools_on_cpu(on_cpu, SERVICES) == ["pools.all"]
    assert pools_on_cpu(on_cpu, elsewhere) == pools_on_cpu(placed(tmp_path, "", 2), SERVICES) == []
    assert list(start_cautions(placed(tmp_path, "", 2), gpus(2), SERVICES)) == []


def test_a_gpu_that_a_pool_names_has_to_be_there_for_services_that_start_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_checks, "check_paths", lambda *_: None)
    pools = "pools: {a: {devices: ['cuda:0'], roles: [actor, reward]}, b: {roles: [reference]}}"
    recipe = placed(tmp_path, pools, 0)

    def check(found: HostGpus, *services: str) -> None:
        monkeypatch.setattr(start_checks, "host_gpus", lambda: found)
        start_checks.check_start(recipe, services)

    missing = r"pools\.a\.devices is \['cuda:0'\], but this host has no GPU for the actor: "
    with pytest.raises(ValueError, match=missing + "torch is for the CPU; mend that"):
        check(HostGpus(unusable="torch is for the CPU"), "reference", "actor")
    monkeypatch.setattr(host_gpus_module, "_DRIVERS", (tmp_path / "none",))
    with pytest.raises(ValueError, match=missing + "there is no nvidia-smi and no driver"):
        check(HostGpus(), "actor")
    # A container may have the driver alone: the service looks.
    monkeypatch.setattr(host_gpus_module, "_DRIVERS", (tmp_path,))
    check(HostGpus(), "actor")
    check(HostGpus(unusable="nvidia-smi fails", is_known=False), "actor")
    check(gpus(1), "actor", "reference", "reward")
    # Started elsewhere, on the CPU, or without a model: nothing is missing.
    check(HostGpus(unusable="torch is for the CPU"), "reference", "reward")


def smi(folder: Path, script: str) -> dict[str, str]:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": str(folder)}


def test_gpus_are_those_that_nvidia_smi_shows_and_torch_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = smi(tmp_path, "echo 'NVIDIA H100 80GB HBM3, 81559'; echo 'NVIDIA L40S, 46068'")
    version = "2.13.0"
    monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    assert host_gpus(environment) == HostGpus(
        count=2, name="NVIDIA H100 80GB HBM3", bytes_each=46068 << 20
    )
    assert host_gpus(environment | {"CUDA_VISIBLE_DEVICES": "1"}).count == 1
    hidden = host_gpus(environment | {"CUDA_VISIBLE_DEVICES": ""})
    assert hidden.count == 0
    assert "CUDA_VISIBLE_DEVICES" in hidden.unusable
    version = "2.13.0+cpu"
    built = host_gpus(environment)
    assert built.count == 0
    assert "2.13.0+cpu" in built.unusable


def test_no_gpus_are_found_without_a_driver(tmp_path: Path) -> None:
    assert host_gpus({"PATH": str(tmp_path)}) == HostGpus()
    failing = host_gpus(smi(tmp_path, "exit 9"))
    assert "fails" in failing.unusable
    assert not failing.is_known
