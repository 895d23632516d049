"""What `rolemesh doctor` finds of this host's GPUs: their driver, and what moves weights."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shutil
from pathlib import Path

from packaging.version import Version

from rolemesh.coordinator.commands.findings.findings import Finding, ok, warn

OLDEST_DRIVERS = {12: 525, 13: 580}
"""First branch of NVIDIA's driver that runs programs for a major version of CUDA; within one, the
minor versions are compatible (NVIDIA, CUDA Compatibility, "Minor Version Compatibility")."""

_NVIDIA_SMI_TIMEOUT_S = 20
_TORCH_CUDA = re.compile(r"^cuda\b.*=\s*['\"](\d+(?:\.\d+)?)['\"]", re.MULTILINE)


async def check_gpus(installed: dict[str, str]) -> list[Finding]:
    """What nvidia-smi shows, and where there are GPUs what moves weights between them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [ok("gpu", "none (no nvidia-smi): roles use the CPU")]
    process = await asyncio.create_subprocess_exec(
        program,
        "--query-gpu=index,name,memory.total,driver_version",
        "--format=csv,noheader",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _NVIDIA_SMI_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        output = f"no answer within {_NVIDIA_SMI_TIMEOUT_S} s".encode()
    text = output.decode(errors="replace").strip()
    if process.returncode != 0:
        remedy = "fix the driver, or use pools with devices: [cpu]"
        return [warn("gpu", f"nvidia-smi fails: {text}", remedy)]
    lines = text.splitlines()
    gpus = [ok("gpu", line) for line in lines]
    drivers = [line.rpartition(",")[2].strip() for line in lines[:1]]
    too_old = [check_driver(driver, torch_cuda(), installed) for driver in drivers]
    return [*gpus, *(finding for finding in too_old if finding), check_nccl(installed)]


def torch_cuda() -> str:
    """Version of CUDA that the installed torch is built for, as `torch.version.cuda`.

    Reads torch's own file of versions and imports nothing. Empty where there is no torch, or one
    for the CPU.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    versions = Path(spec.origin).with_name("version.py")
    found = _TORCH_CUDA.search(versions.read_text()) if versions.is_file() else None
    return found[1] if found else ""


def check_driver(driver: str, cuda: str, installed: dict[str, str]) -> Finding | None:
    """What to do about a driver that is too old for the installed torch; None where it is not.

    Args:
        driver: Its version, as nvidia-smi shows it: "570.86.10".
        cuda: What torch is built for: "13.0"; empty: no CUDA.
        installed: Versions of packages by name.
    """
    branch = driver.partition(".")[0]
    oldest = OLDEST_DRIVERS.get(int(cuda.partition(".")[0] or 0))
    if oldest is None or not branch.isdecimal() or int(branch) >= oldest:
        return None
    remedy = f"install driver {oldest} or newer"
    if int(branch) >= OLDEST_DRIVERS[12]:
        remedy += (
            f"; or, for driver {driver}, in a new environment: {_for_cuda_12(installed)} (not "
            "tried; docs/installing.md says what is known). NVIDIA's cuda-compat libraries may do "
            "as well on GPUs of data centres; nvidia-smi does not show them"
        )
    text = f"{driver} is too old: torch is built for CUDA {cuda}, which wants driver {oldest}"
    return warn("driver", f"{text} or newer", remedy)


def _for_cuda_12(installed: dict[str, str]) -> str:
    """The command that installs the same releases, built for CUDA 12."""
    versions = {
        name: Version(installed[name]).public for name in ("torch", "vllm") if name in installed
    }
    indexes = ["https://download.pytorch.org/whl/cu129"]
    # The extra asks for vLLM, which PyPI has for CUDA 13 alone.
    wanted = "rolemesh cupy-cuda12x"
    if "vllm" in versions:
        wanted = "'rolemesh[gpu-cuda12]'"
        indexes.append(f"https://wheels.vllm.ai/{versions['vllm']}/cu129")
    return " ".join(
        [
            f"pip install {wanted}",
            *(f"{name}=={version}+cu129" for name, version in versions.items()),
            *(f"--extra-index-url {index}" for index in indexes),
        ]
    )


def check_nccl(installed: dict[str, str]) -> Finding:
    """Whether ranks on GPUs can exchange weights: cupy, and NCCL for the same CUDA as cupy's."""
    cupy = next((name for name in sorted(installed) if name.startswith("cupy-cuda")), "")
    nccl = next((name for name in sorted(installed) if name.startswith("nvidia-nccl-cu")), "")
    if not cupy:
        return warn(
            "nccl",
            "cupy is not installed: ranks on GPUs exchange weights by torch, which is slower",
            "install rolemesh[gpu], or cupy of the same CUDA version as torch",
        )
    found = f"{cupy} {installed[cupy]}, "
    found += f"{nccl} {installed[nccl]}" if nccl else "NCCL not from a Python package"
    cuda, other = cupy.removeprefix("cupy-cuda")[:2], nccl.removeprefix("nvidia-nccl-cu")[:2]
    if nccl and cuda != other:
        remedy = f"install cupy-cuda{other}x, as torch's NCCL"
        return warn("nccl", f"{found}: made for different versions of CUDA", remedy)
    return ok("nccl", found)
