"""What a role does not use is not imported where its process starts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MODELS = ("transformers", "torch._dynamo", "torch.distributed.tensor", "sympy")
"""What loading or training a model brings: three of the five seconds in which an actor starts."""
TRAINER = "rolemesh.engine.train.trainer"
VLLM = "vllm"
HEAVY = (*MODELS, TRAINER, VLLM)


def brought(*modules: str) -> dict[str, list[str]]:
    """What of HEAVY is there after each module, imported in turn in a process of its own."""
    program = (
        "import importlib, json, os, sys\n"
        "there = {}\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module('rolemesh.services.' + module)\n"
        f"    there[module] = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print(json.dumps(there), flush=True)\n"
        "os._exit(0)  # To take the modules down would take as long as to import some.\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    there: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return there


def test_agents_and_roles_without_a_model_of_their_own_import_none() -> None:
    """A reward may be a classifier, and a sampler has a model; Initialize imports it then."""
    # All that an agent of several ranks is.
    modules = ("runtime.process", "rollout.servicers", "reward.servicers", "cost.servicers")
    assert brought(*modules) == {module: [] for module in modules}


@pytest.mark.slow
@pytest.mark.parametrize("role", ["reference", "critic", "actor"])
def test_roles_with_a_model_import_no_trainer_before_they_train_and_no_vllm(role: str) -> None:
    (there,) = brought(f"{role}.servicers").values()
    assert there == list(MODELS)
