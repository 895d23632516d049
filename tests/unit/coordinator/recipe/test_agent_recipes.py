"""Recipes of agents and endpoints that cannot work are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.service_flags import service_flags
from rolemesh.engine.granted.grants import Grant, NotGrantedError
from rolemesh.engine.specs import EndpointSpec, HttpAgentSpec, ProgramAgentSpec

ROOT = Path(__file__).resolve().parents[4]
RECIPE = ROOT / "recipes/agent-grpo.yaml"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "schedule.sampler={type: sync, block_rows: 6}",
            "block_rows is 6, but .*any number of rows",
        ),
        ("algorithm.type=dapo", "type is 'dapo', which selects whole groups"),
        ("actor.endpoint=null", "asks the policy at an endpoint, and there is none"),
        ("actor.rollout.type=hf", "endpoint is given, but rollout.type is 'hf'"),
        ("actor.endpoint.host=0.0.0.0", "without certificate and token_variable: give both"),
        ("actor.environment.max_turns=0", "max_turns is 0 .*give 1 or more"),
        ("actor.environment.on_failure=zero", "on_failure"),
    ],
)
def test_what_agents_cannot_be_run_with_is_refused(change: str, message: str) -> None:
    load_recipe([RECIPE])
    with pytest.raises(RecipeError, match=message):
        load_recipe([RECIPE], overrides=[change])


def test_a_token_goes_to_a_server_of_agents_over_tls_alone() -> None:
    HttpAgentSpec(url="https://agents.example/play", token_variable="AGENT_TOKEN")
    with pytest.raises(ValidationError, match="not encrypted"):
        HttpAgentSpec(url="http://agents.example/play", token_variable="AGENT_TOKEN")
    with pytest.raises(ValidationError, match="without token_variable: give both"):
        EndpointSpec(host="::", certificate=Path("server.pem"))


def test_a_program_is_granted_by_the_folder_of_its_file(tmp_path: Path) -> None:
    inside, outside = tmp_path / "agents", tmp_path / "other"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "mine.py").write_text("print(1)\n")
    grant = Grant(code_roots=(inside,))

    def check(*command: str) -> None:
        grant.check(ProgramAgentSpec(command=command), "environment.")

    check("python", str(inside / "mine.py"), "--fast", "7")
    check(str(inside / "mine.py"))
    for command, what in (
        (("python", str(outside / "mine.py")), "--code-root"),
        (("python", str(inside / "mine.py"), str(outside / "mine.py")), "--code-root"),
        (("python", "-c", "print(1)"), "an option of the interpreter"),
        (("sh", str(inside / "mine.py")), "which is no file"),
        (("/bin/sh", str(inside / "mine.py")), "--code-root"),
    ):
        with pytest.raises(NotGrantedError, match=what):
            check(*command)


def test_a_run_grants_its_own_services_what_its_recipe_names() -> None:
    recipe = load_recipe([RECIPE])
    flags = service_flags(recipe, "actor")
    assert "--code-name=examples/agents/calculator_agent.py:run" in flags
    script = str(ROOT / "examples/agents/calculator_agent.py")
    program = load_recipe(
        [RECIPE],
        overrides=["actor.environment={type: program, command: [python, " + script + ", --fast]}"],
    )
    granted = [flag for flag in service_flags(program, "actor") if "--code-name" in flag]
    assert granted == [f"--code-name={script}"]
