"""What services make code of, or read as pickles, in their whole life: of nothing that arrives.

Real processes, told by audit hooks from Initialize on: two steps with checkpoints, publications,
rewards and an environment, an export, and a checkpoint that is loaded.
"""

from __future__ import annotations

import pickle  # noqa: TID251 - its error alone
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support import audit
from support.audit import Event
from support.hostile_folders import pickle_that_runs
from support.learning_runs import learn, service_processes
from support.mesh_runs import tiny_model, tiny_recipe
from support.services import operation_key

from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.rpc.channel import open_channel

REPOSITORY = Path(__file__).resolve().parents[2]

USERS = """
def judge(completions, **columns):
    return [float("7" in text) for text in completions]
"""

IMPORTS = frozenset({"importlib._bootstrap", "importlib._bootstrap_external", "runpy"})
"""Modules that run files of Python. Those must be installed, see `is_installed`."""

OWN_PROGRAMS = (
    "-m rolemesh.services.reward.outside.functions.worker",
    # Where a worker's Python looks for modules, which its sandbox has to show.
    "-P -c import sys; print(*sys.path",
    "bwrap --unshare-user",
    # Tasks of reasoning-gym import matplotlib, which lists the fonts of a new machine once.
    "fc-list --",
)
"""In the command lines of programs that a service starts."""

OF_DEFINITIONS = "code that a module's own definitions are made of, while it is imported"
LEGITIMATE: Mapping[tuple[str, str], str] = {
    ("compile", "ast"): "a tree is no code: a calculation of the policy's, a file of the owner's",
    ("compile", "collections"): OF_DEFINITIONS,
    ("exec", "collections"): OF_DEFINITIONS,
    ("compile", "dataclasses"): OF_DEFINITIONS,
    ("exec", "dataclasses"): OF_DEFINITIONS,
    ("compile", "six"): OF_DEFINITIONS,
    ("exec", "six"): OF_DEFINITIONS,
    ("compile", "typing"): OF_DEFINITIONS,
    ("compile", "jinja2.environment"): "the chat template of a folder that the owner granted, "
    "which transformers compiles in Jinja's sandbox",
    ("exec", "jinja2.environment"): "the same",
}
"""Event and the module in which it happens, with the reason why it is harmless."""


def is_installed(file: str) -> bool:
    """Whether a file is of Python, of an installed package or of ours."""
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return file.startswith("<frozen ") or any(
        Path(file).resolve().is_relative_to(Path(place).resolve())
        for place in (*places, *(REPOSITORY / name for name in ("src", "engine", "services")))
    )


def foreign(event: Event) -> bool:
    """Whether an event is none of those that are known to be harmless."""
    if event.caller in IMPORTS:
        # What is read of a module's file is not told by its name, and `exec` of it is next.
        return not event.name.startswith("marshal") and not is_installed(event.detail)
    if event.name == "subprocess.Popen":
        return not any(known in event.detail for known in OWN_PROGRAMS)
    return (event.name, event.caller) not in LEGITIMATE


async def live(folder: Path, recipe: Mapping[str, Any], addresses: Mapping[str, str]) -> None:
    """A run, and what a run does only when it goes on: weights are fetched, a checkpoint loaded."""
    await learn(recipe, addresses, folder / "run")
    (checkpoint,) = (folder / "run").glob("checkpoints/*2/actor")
    async with open_channel(addresses["actor"]) as channel:
        actor = ServiceClient(channel)
        await actor.initialize(operation_key("initialize"), recipe["actor"], 3)
        await actor.load_checkpoint(operation_key("load"), str(checkpoint))


async def test_services_run_and_unpickle_nothing_that_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    told.mkdir()
    monkeypatch.setenv(audit.VARIABLE, str(told))
    (tmp_path / "mine.py").write_text(USERS)
    model = tiny_model(tmp_path / "model")
    recipe = tiny_recipe(
        model,
        run__checkpoint__every_steps=2,
        actor__environment={"type": "calculator", "max_turns": 2},
        reward__source=[
            {"source": {"type": "environment"}, "weight": 1.0},
            {"source": f"python:{tmp_path / 'mine.py'}:judge", "weight": 1.0},
        ],
    )
    with service_processes(tmp_path, ("actor", "critic", "reference", "reward")) as addresses:
        await live(tmp_path, recipe, addresses)
    found = audit.recorded(told)
    assert len(found) == 4
    assert all(found.values())
    strange = {name: [*filter(foreign, events)] for name, events in found.items()}
    assert not any(strange.values()), strange


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_the_record_tells_what_is_run_and_unpickled(tmp_path: Path) -> None:
    """Otherwise an empty one would prove nothing."""
    mark = tmp_path / "ran"
    (tmp_path / "file.pt").write_bytes(pickle_that_runs(mark))
    with audit.recording() as events:
        exec("1 + 1")  # noqa: S102
        subprocess.run(["/bin/true", "-x"], check=True)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(tmp_path / "file.pt", weights_only=True)  # noqa: TID251
        assert not mark.exists()
        # It tells of the wrong bytes once it has run them.
        with pytest.raises(RuntimeError, match="magic number"):
            torch.load(tmp_path / "file.pt", weights_only=False)  # noqa: TID251
    assert mark.exists()
    told = [(event.name, event.detail) for event in events if foreign(event)]
    assert ("exec", "<string>") in told
    assert ("subprocess.Popen", "/bin/true -x") in told
    assert ("pickle.find_class", "posix.mkdir") in told
    assert [name for name, _ in told].count(audit.UNPICKLING) == 2
