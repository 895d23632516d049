"""Test of roles that are not ours: they stand in by their address in the recipe alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.lasting_services import MadeRun, lasting_services
from support.mesh_runs import tiny_model, tiny_recipe
from support.services import wait_for_announcement
from support.tiny_models import write_tiny_llama

from rolemesh.coordinator.compliance.check import Finding
from rolemesh.coordinator.compliance.contract import Outcome
from rolemesh.coordinator.compliance.suite import run_suite
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.training_run import TrainingRun
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.services.actor.servicers import ActorRole
from rolemesh.services.critic.servicers import CriticRole
from rolemesh.services.reference.servicers import ReferenceRole
from rolemesh.services.reward.servicers import RewardRole
from rolemesh.services.runtime.calls.role import Role
from rolemesh.services.teacher.servicers import TeacherRole

SCRIPT = Path(__file__).parents[1] / "support" / "outside_reference.py"

RELATIVE = 1e-3
ABSOLUTE = 1e-4
"""The outsider scores row by row, ours in packed micro-batches: float32 sums in another order, of
log-probs around 5, carried through two optimizer steps."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights than the policy's.

    Between equal ones the divergence is rounding alone, which advantages of variance one enlarge.
    """
    folder = tmp_path_factory.mktemp("frozen") / "tiny"
    return write_tiny_llama(folder, seed=1, max_position_embeddings=512)


@pytest.fixture(scope="module", params=["reference", "teacher"])
def role(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def outside(role: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the outsider's server, a process of its own."""
    announce = tmp_path_factory.mktemp("outside") / "announce.json"
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(announce), role],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield wait_for_announcement(process, announce)["address"]
    finally:
        process.kill()
        process.wait(30)


def test_the_outsider_shares_no_code_with_rolemesh_but_the_protos() -> None:
    imported = [line for line in SCRIPT.read_text().splitlines() if "import" in line]
    assert [line for line in imported if "rolemesh" in line] == ["from rolemesh.v1 import ("]


@pytest.mark.slow
async def test_the_outsider_passes_the_suite(outside: str, role: str, model: Path) -> None:
    findings: list[Finding] = await run_suite(
        f"grpc://{outside}", role, {"model": {"path": str(model)}}
    )
    broken = [one.check.check_id for one in findings if one.outcome is not Outcome.HOLDS]
    assert broken == ["transport.reflection"], "it has none, which is a SHOULD"


@pytest.mark.slow
async def test_a_run_with_an_outside_role_learns_what_one_with_ours_does(
    outside: str, role: str, model: Path, frozen: Path, tmp_path: Path
) -> None:
    ours_of: dict[str, list[Role]] = {
        "reference": [CriticRole(), ReferenceRole()],
        "teacher": [TeacherRole()],
    }
    roles = [ActorRole(), RewardRole(), *ours_of[role]]
    async with lasting_services(roles, model, tmp_path) as services:
        ours = await train(services.addresses, model, frozen, tmp_path / "ours")
        theirs = await train(
            {**services.addresses, role: outside}, model, frozen, tmp_path / "theirs"
        )
    assert len(ours.records) == len(theirs.records) == 2
    for mine, other in zip(ours.numbers, theirs.numbers, strict=True):
        # The report of the call is the outsider's own: he sends none.
        assert set(other) <= set(mine)
        assert set(mine) - set(other) <= {f"{role}/num_tokens"}
        for name, value in other.items():
            assert value == pytest.approx(mine[name], rel=RELATIVE, abs=ABSOLUTE), name
    kl = {"reference": "kl/mean", "teacher": "kl/teacher"}[role]
    assert abs(theirs.numbers[-1][kl]) > 100 * ABSOLUTE


async def train(addresses: dict[str, str], model: Path, frozen: Path, directory: Path) -> MadeRun:
    values: dict[str, Any] = tiny_recipe(model, reference__model__path=str(frozen))
    if "teacher" in addresses:
        values["teacher"] = values.pop("reference")
        del values["critic"]
        values["algorithm"] = {
            "type": "on_policy_distillation",
            "sampling": values["algorithm"]["sampling"],
            "mini_batch_rows": 4,
            "policy_loss": {"type": "distillation", "top_k": 7},
        }
    values["services"] = {role: {"address": f"grpc://{at}"} for role, at in addresses.items()}
    values["store"] = {"type": "memory"}
    recipe = Recipe.model_validate(yaml.safe_load(yaml.safe_dump(values)))
    known = {role: recipe.address(role) or "" for role in addresses}
    run = TrainingRun(recipe, directory=directory, addresses=known, store=MemoryStateStore())
    await run.execute()
    return MadeRun(directory)
