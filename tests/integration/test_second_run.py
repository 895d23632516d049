"""A second run in the same processes: nothing of the first one's models is left when it begins."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.mesh_runs import tiny_model
from support.rollout_services import Caller
from support.services import serving
from support.tiny_models import write_tiny_classifier
from torch import nn

from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.critic.servicers import CriticRole
from rolemesh.services.reference.servicers import ReferenceRole
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.services.rollout.servicers import RolloutRole
from rolemesh.services.runtime.calls.role import Role
from rolemesh.v1 import worker_pb2, worker_pb2_grpc

HF = {"type": "hf", "max_model_len": 128, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def models_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[nn.Module]]]:
    """Every module that is made meanwhile."""
    made: list[weakref.ref[nn.Module]] = []
    begin = nn.Module.__init__

    def note(module: nn.Module, *arguments: Any, **named: Any) -> None:
        begin(module, *arguments, **named)
        made.append(weakref.ref(module))

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__init__", note)
        yield made


async def use(caller: Caller, role: Role) -> None:
    """A step of the role, so far as it takes part in one."""
    if isinstance(role, ActorRole):
        result = await caller.generate(0, count=2)
        await caller.train(result.experience, version=0)
        await caller.generate(1, count=2)


@pytest.mark.parametrize(
    "kind", [ActorRole, CriticRole, ReferenceRole, RewardRole, RolloutRole], ids=lambda r: r.name
)
async def test_a_given_up_run_leaves_no_module_behind(
    kind: type[Role], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = kind()
    spec: dict[str, Any] = {"model": {"path": str(model)}}
    if kind in (ActorRole, RolloutRole):
        spec["rollout"] = HF
    else:
        spec["data"] = None
    if kind is RewardRole:
        path = write_tiny_classifier(tmp_path / "judge", num_labels=1)
        spec |= {"model": None, "source": {"type": "classifier", "model": {"path": str(path)}}}
    async with serving(role) as server:
        caller = Caller(server.runtime.address)
        worker = worker_pb2_grpc.WorkerServiceStub(caller.channel)
        gc.disable()  # The service's own collection frees them, and no other.
        try:
            for _ in range(2):
                with models_made(monkeypatch) as made:
                    await caller.initialize(**spec)
                    await use(caller, role)
                assert any(one() is not None for one in made)
                await worker.Drain(worker_pb2.DrainRequest())
                left = [type(module).__name__ for one in made if (module := one()) is not None]
                assert left == []
        finally:
            gc.enable()
            await caller.channel.close()
