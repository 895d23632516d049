"""Traces of real runs over real services, as a collector gets them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_roles import fake_mesh, fake_recipe
from support.fake_runs import Recorder
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.trace_collector import CollectedSpan, Collector, collecting

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.recipe.schema import Recipe, TracingSpec
from rolemesh.coordinator.run.session import Session
from rolemesh.rpc.errors import PreconditionError

RUN_S = 120.0
"""Longest a tiny run may take on a busy machine."""


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Collector, CliRun]]:
    """One run of real services, the critic's on two ranks."""
    folder = tmp_path_factory.mktemp("traced")
    with collecting() as collector:
        recipe = tiny_recipe(
            tiny_model(folder / "model"),
            critic__train={"dp": 2},
            tracing={"endpoint": collector.endpoint},
        )
        run = CliRun(recipe, folder)
        try:
            assert run.wait(RUN_S) == 0, run.output
            yield collector, run
        finally:
            run.close()


def one(spans: list[CollectedSpan], name: str) -> CollectedSpan:
    (found,) = [span for span in spans if span.name == name]
    return found


def test_a_run_is_one_connected_tree(traced: tuple[Collector, CliRun]) -> None:
    collector, run = traced
    root = one(collector.spans, "run tiny")
    assert root.parent_id == b""
    assert root.attributes["run_id"] == json.loads((run.out / "summary.json").read_text())["run_id"]
    assert [span for span in collector.spans if span.trace_id != root.trace_id] == []
    assert len(collector.below(root)) == len(collector.spans) - 1
    assert {span.service for span in collector.spans} == {
        f"rolemesh-{name}" for name in ("coordinator", "actor", "critic", "reference", "reward")
    }
    assert not [span for span in collector.spans if span.failed_with]


def test_below_a_step_are_the_nodes_of_its_graph(traced: tuple[Collector, CliRun]) -> None:
    collector, run = traced
    root = one(collector.spans, "run tiny")
    graphs = [json.loads(line) for line in (run.out / "dataflow.jsonl").read_text().splitlines()]
    for graph in graphs:
        steps = [s for s in collector.children(root) if s.name == f"step {graph['step']}"]
        # An evaluation after the last step has a graph of its own.
        step = steps[0]
        spans = collector.children(step)
        nodes = {f"{node['role']}.{node['method']}": node for node in graph["nodes"]}
        assert {span.name for span in spans} == set(nodes)
        for span in spans:
            node = nodes[span.name]
            assert span.attributes["num_tokens"] == node["num_tokens"]
            assert span.attributes["num_bytes"] == node["num_bytes"]
            assert span.attributes.get("policy_version") == node["policy_version"]
            assert step.start_ns <= span.start_ns <= span.end_ns <= step.end_ns


def test_a_call_shows_every_rank_and_what_each_fetches_from_whom(
    traced: tuple[Collector, CliRun],
) -> None:
    collector, _ = traced
    steps = [span for span in collector.spans if span.name == "step 1"]
    node = one(collector.children(steps[0]), "critic.compute_values")
    (face,) = collector.children(node)
    assert (face.service, face.name) == ("rolemesh-critic", "ValueService/ComputeValues")
    assert face.attributes["rank"] == 0
    assert face.attributes["step"] == 1
    assert face.attributes["operation"] == "critic.compute_values"
    assert face.attributes["num_tokens"] > 0
    (peer,) = [span for span in collector.children(face) if span.name == face.name]
    assert peer.attributes["rank"] == 1
    for rank in (face, peer):
        inside = collector.children(rank)
        fetch = one(inside, "fetch")
        (served,) = collector.children(fetch)
        assert (served.service, served.name) == ("rolemesh-actor", "ExperienceService/Fetch")
        assert "compute" in {span.name for span in inside}


def traced_recipe(services: dict[str, Any], endpoint: str) -> Recipe:
    recipe = fake_recipe(services=services)
    return recipe.model_copy(update={"tracing": TracingSpec(endpoint=endpoint)})


async def test_a_failed_call_carries_its_reason_up_the_tree(tmp_path: Path) -> None:
    with collecting() as collector:
        async with fake_mesh() as mesh:
            mesh.roles["actor"].failures["Update"] = PreconditionError("oh", reason="BROKEN")
            services = {role: {"address": address} for role, address in mesh.addresses.items()}
            recipe = traced_recipe(services, collector.endpoint)
            with pytest.raises(RunError):
                await Session(recipe, tmp_path / "run", Recorder()).execute()
    failed = {span.name: span.attributes["reason"] for span in collector.spans if span.failed_with}
    assert failed["actor.update"] == failed["step 1"] == "BROKEN"


async def test_a_collector_that_never_answers_costs_the_run_a_note(tmp_path: Path) -> None:
    recorder = Recorder()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with fake_mesh() as mesh:
            services = {role: {"address": address} for role, address in mesh.addresses.items()}
            recipe = traced_recipe(services, endpoint)
            async with asyncio.timeout(RUN_S):
                summary = await Session(recipe, tmp_path / "run", recorder).execute()
    assert summary.steps == recipe.run.steps
    assert sum("traces are not sent" in event for event in recorder.events) <= 1
