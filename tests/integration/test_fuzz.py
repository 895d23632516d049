"""Malformed requests to every method of every role, and every route of a coordinator.

Nothing crashes or hangs, each is answered with a status that says what is wrong with it, a service
keeps its run, and memory stays flat. `make fuzz MESSAGES=10000` sends so many to each method and
route and leaves a line of figures for each server in build/fuzz.jsonl; `make test` sends a few.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import grpc
import pytest
from support.coordinator_doors import written as write_identity
from support.fake_run import fill_store
from support.fuzzing import PATIENCE_S, RUN, SEED, Figures, Fuzzed, is_harmful, sent
from support.learning_runs import service_processes
from support.malformed import TEXTS, Known, Malformed
from support.mesh_runs import remove_cuts, tiny_recipe
from support.raw_http import RawHttp
from support.services import operation_key
from support.tiny_models import write_tiny_classifier, write_tiny_llama

from rolemesh.coordinator.api.doors.doors import open_doors
from rolemesh.coordinator.api.store_operations import StoreOperations
from rolemesh.coordinator.recipe.sections.api_section import ApiSpec
from rolemesh.coordinator.state.memory import MemoryStateStore
from rolemesh.coordinator.state.redis import RedisStateStore
from rolemesh.coordinator.state.server.embedded import EmbeddedValkey
from rolemesh.rpc.calls.service_client import ServiceClient
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.experience.references import join_references, shards_of
from rolemesh.rpc.experience.tensors import data_type_of
from rolemesh.rpc.members.authority import Authority
from rolemesh.rpc.policy import rolemesh_methods
from rolemesh.services.runtime.hosts.door import AgentDoor
from rolemesh.services.runtime.hosts.meeting import HostMeeting
from rolemesh.services.runtime.server.config import ServiceConfig
from rolemesh.v1 import hosts_pb2, rollout_pb2, worker_pb2
from rolemesh.v1.hosts_pb2 import JoinHostsRequest, ServiceHost

FEW = 8
"""Messages for each method and route in `make test`."""

MANY = int(os.environ.get("FUZZ_MESSAGES", "200"))
"""The same in `make test-slow`; `make fuzz` sets it."""

ROLES = ("actor", "critic", "reference", "reward", "cost", "rollout")


def specs_of(folder: Path) -> Mapping[str, Any]:
    """The section of each role; as in test_compliance_services."""
    recipe = tiny_recipe(write_tiny_llama(folder / "llama", max_position_embeddings=512))
    head = write_tiny_classifier(folder / "head", num_labels=1)
    actor = recipe["actor"]
    return {
        **recipe,
        "cost": recipe["reward"],
        "critic": {**recipe["critic"], "model": {"path": str(head), "compute_dtype": "float32"}},
        "rollout": {
            "model": {"path": actor["model"]["path"]},
            **{name: actor[name] for name in ("rollout", "data")},
        },
    }


async def known_of(clients: Mapping[str, ServiceClient]) -> Known:
    """A batch that all roles have worked on, published weights, a cut, and words that mean much."""
    sampling = rollout_pb2.Sampling(
        samples_per_prompt=2, temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4
    )
    prompts = rollout_pb2.PromptSlice(split=rollout_pb2.SPLIT_TRAIN, count=2)

    def key(operation: str) -> Any:
        return operation_key(f"setup.{operation}", step=1)

    batch = (await clients["actor"].generate(key("generate"), prompts, sampling)).experience
    parts = [batch]
    for role, made in (
        ("reference", lambda of: of.compute_logprobs(
            key("logprobs"), batch, "reference_logprobs", temperature=1.0, with_entropy=False
        )),
        ("critic", lambda of: of.compute_values(key("values"), batch)),
        ("reward", lambda of: of.compute_reward(key("reward"), batch)),
    ):  # fmt: skip
        if role in clients:
            parts.append((await made(clients[role])).experience)
    await clients["actor"].save_cut(key("cut"))
    published = await clients["actor"].publish_weights(key("publish"), data_type_of("float32"))
    if "rollout" in clients:
        await clients["rollout"].update_weights(key("take"), published.weights)
    whole = join_references(parts)
    shards = shards_of(whole)
    return Known(
        values={
            "run_id": [RUN, RUN, RUN, "other"],
            "fencing_epoch": [1],
            "step": [1],
            "operation": ["fuzz"],
            "lineage": [0],
            "experience_id": [shard.experience_id for shard in shards],
            "experience_ids": [shard.experience_id for shard in shards],
            "address": [shard.address for shard in shards] + ["127.0.0.1:1"],
            "addresses": [*published.weights.addresses],
            "columns": ["tokens", "prompt_lengths", "logprobs"],
            "column": ["values", "new"],
            "name": ["tokens", "logprobs", "values", "fuzz"],
            "parameter": [one.name for one in published.weights.parameters],
            "policy_version": [published.weights.policy_version],
            "expected_policy_version": [0, 1, 2],
            "type": ["ppo_policy", "gae", "sft", "grpo", "ppo_value", "pass_rate"],
            "temperature": [1.0],
            "top_p": [1.0, 0.5],
            "max_new_tokens": [4, 8],
            "samples_per_prompt": [1, 2],
            "epochs": [1, 2],
            "mini_batch_rows": [2, 4],
            "count": [1, 2],
            "start": [0, 3, 2**40],
        },
        messages={
            "ExperienceRef": [whole, batch],
            "WeightsRef": [published.weights],
            "Sampling": [sampling],
        },
    )


IDLE = Known(values={"run_id": ["other"], "directory": [], "address": []})
"""For a service that holds no run."""


async def fuzz_roles(folder: Path, names: tuple[str, ...], number: int) -> None:
    """Sends so many to every method of every role, before it holds a run and while it does."""
    specs = specs_of(folder)
    capacity = ("--experience-capacity-bytes", str(32 << 20))
    with contextlib.ExitStack() as ending:
        # Cuts outlive the services, which are killed.
        ending.callback(remove_cuts, RUN)
        addresses = ending.enter_context(service_processes(folder, names, *capacity))
        channels = {name: open_channel(address) for name, address in addresses.items()}
        bare = {name: grpc.aio.insecure_channel(address) for name, address in addresses.items()}
        clients = {name: ServiceClient(channel) for name, channel in channels.items()}
        told = {name: await client.get_capabilities() for name, client in clients.items()}
        figures = {name: Figures(name, told[name].pid) for name in names}
        paths = {
            name: [path for path in rolemesh_methods() if path.split("/")[1] in told[name].services]
            for name in names
        }

        async def fuzz(name: str, seed: int, known: Known, methods: Iterable[str]) -> None:
            fuzzed = Fuzzed(
                bare[name],
                figures[name],
                Malformed(seed, known),
                lambda path, request: is_harmful(path, request, known),
            )
            for path in methods:
                await fuzzed.method(path, number)
                if path.endswith("/Sleep"):
                    await clients[name].wake(operation_key("wake"))
                if known is not IDLE and not figures[name].before_bytes:
                    figures[name].warm()

        begin = [f"/rolemesh.v1.WorkerService/{method}" for method in ("Initialize", "Attach")]
        await asyncio.gather(*(fuzz(name, SEED, IDLE, begin) for name in names))
        for name, client in clients.items():
            await client.initialize(operation_key("initialize"), specs[name], 3)
        known = await known_of(clients)
        heard = asyncio.create_task(_heard(clients))

        async def fuzz_busy(name: str) -> None:
            mine = [path for path in paths[name] if not path.endswith("/Initialize")]
            assert len(mine) > 9
            mine.sort(key=lambda path: path.endswith(("/Release", "/DropCuts")))
            # Each role has a folder of its own: two that write one at once are no stranger's doing.
            own = {"directory": [str(folder / f"saved-{name}"), "saved", ""]}
            await fuzz(name, SEED + 1, replace(known, values={**known.values, **own}), mine)
            status = await clients[name].get_status(RUN)
            assert (status.run_id, status.failure) == (RUN, ""), f"{name}: {status}"
            assert status.state != worker_pb2.WORKER_STATE_FAILED

        # At once, so that a role that computes or waits for a disk leaves no processor idle.
        await asyncio.gather(*map(fuzz_busy, names))
        heard.cancel()
        for channel in (*channels.values(), *bare.values()):
            await channel.close()
        faults = [fault for one in figures.values() for fault in one.faults()]
        assert not faults, "\n".join(faults)


async def _heard(clients: Mapping[str, ServiceClient]) -> None:
    """Keeps the hold on all services, as a coordinator does."""
    while True:
        for client in clients.values():
            await client.get_status(RUN)
        await asyncio.sleep(1.0)


# --- the coordinator --------------------------------------------------------------------------

WRONG_RECIPES = (
    "run: &a [*a]",
    "a: &a [x, x]\nb: &b [*a, *a, *a]\n" + "run: [" + "*b, " * 20_000 + "]\n",
    "run: {name: x, steps: -1}\nalgorithm: {type: ppo}\n",
    "algorithm: {type: !!timestamp x}",
    "- 1\n- 2\n",
)  # fmt: skip


async def fuzz_coordinator(folder: Path, number: int) -> None:
    """Sends so many to every method of CoordinatorService and to every REST route of a hub."""
    async with EmbeddedValkey(folder / "valkey") as server:
        store = RedisStateStore(server.url)
        await fill_store(store, "made", folder / "made", num_steps=4)
        await fill_store(store, "live", folder / "live", num_steps=4, is_live=True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rolemesh.coordinator.commands.cli", "coordinator", "--json"),
            *("--data", str(folder / "data"), "--port", "0", "--http-port", "0"),
            # What is behind the doors is sent wrong requests; the doors have tests of their own.
            *("--store-url", server.url, "--open-to-every-local-user"),
            env={k: v for k, v in os.environ.items() if not k.startswith("ROLEMESH_")},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            assert process.stdout is not None
            facts = json.loads(await process.stdout.readline())
            await asyncio.gather(
                fuzz_service(facts["address"], process.pid, number),
                fuzz_rest(facts["url"].rstrip("/"), process.pid, number),
            )
            assert process.returncode is None
        finally:
            process.terminate()
            await process.wait()
            await store.close()


async def fuzz_service(address: str, pid: int, number: int) -> None:
    known = Known(
        values={
            "run_id": ["made", "live", "none"],
            "recipe": WRONG_RECIPES,
            "log": ["actor", "coordinator"],
            "names": ["reward/*", "*"],
            "fencing_epoch": [1, 2],
            "step": [1, 2],
        }
    )
    figures = Figures("coordinator (gRPC)", pid)
    async with grpc.aio.insecure_channel(address) as channel:
        fuzzed = Fuzzed(channel, figures, Malformed(SEED, known), lambda *_: False)
        for path in rolemesh_methods():
            if path.split("/")[1] != "rolemesh.v1.CoordinatorService":
                continue
            await fuzzed.method(path, number)
            if figures.methods == 2:
                figures.warm()
    faults = figures.faults()
    assert not faults, "\n".join(faults)


@pytest.mark.slow
async def test_malformed_requests_leave_an_agent_of_several_hosts_unharmed() -> None:
    config = ServiceConfig(role="actor", layout={"dp": 2}, hosts=2, meet="127.0.0.1:1")
    # No message that is drawn takes a place.
    versions = {"torch": "none that is drawn"}
    service = hosts_pb2.JoinHostsRequest(role="actor", num_hosts=2, layout="", versions=versions)
    meeting = HostMeeting(service, 600.0)
    door = AgentDoor(config, "agent", meeting)
    address = f"127.0.0.1:{await door.open('127.0.0.1', 0)}"
    figures = Figures("agent of several hosts", os.getpid())
    host = ServiceHost(host_rank=0, incarnation="a", address="127.0.0.1:1", host_id="here")
    request = JoinHostsRequest(host=host, role="actor", num_hosts=2, versions=versions)
    async with grpc.aio.insecure_channel(address) as channel:
        known = Known(
            values={"host_rank": [0, 1], "key": ["a"], "role": ["actor"], "wait_ms": [0, 1]}
        )
        fuzzed = Fuzzed(channel, figures, Malformed(SEED, known), lambda *_: False)
        for path in rolemesh_methods():
            if path.split("/")[1] == "rolemesh.v1.HostsService":
                await fuzzed.method(path, MANY)
                if figures.methods == 2:
                    figures.warm()
    assert meeting.join(request) == []
    await door.close()
    faults = figures.faults()
    assert not faults, "\n".join(faults)


@pytest.mark.slow
async def test_malformed_registrations_enter_no_other_service(tmp_path: Path) -> None:
    authority = Authority.make()
    own, caller = authority.issue("coordinator"), authority.issue("reward")
    write_identity(own, tmp_path / "coordinator.pem")
    store, figures = MemoryStateStore(), Figures("coordinator (registry)", os.getpid())
    known = Known(
        values={
            "role": ["reward"],
            "number": [0, 1],
            "address": ["a:1"],
            "incarnation": ["a" * 32, "b" * 32],
            "version": [""],
        }
    )
    doors = open_doors(
        StoreOperations(store),
        ApiSpec(http_port=None, member_port=0),
        folder=tmp_path,
        certificates=tmp_path,
        environment={},
    )
    async with doors as opened:
        assert opened.member_address is not None
        credentials, options = caller.channel_credentials(), tuple(caller.channel_options)
        async with grpc.aio.secure_channel(opened.member_address, credentials, options) as channel:
            fuzzed = Fuzzed(channel, figures, Malformed(SEED, known), lambda *_: False)
            path = "/rolemesh.v1.RegistryService/RegisterService"
            await fuzzed.method(path, FEW)
            figures.warm()
            await fuzzed.method(path, MANY)
    entered = await store.registrations(own.mesh)
    assert entered
    assert {one.role for one in entered} == {"reward"}
    faults = figures.faults()
    assert not faults, "\n".join(faults)


async def fuzz_rest(url: str, pid: int, number: int) -> None:
    figures, malformed = Figures("coordinator (REST)", pid), Malformed(SEED, Known())
    client = RawHttp(url, PATIENCE_S)
    document = json.loads((await client.ask("GET", "/openapi.json", {})).body)
    routes = [
        (path, method, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    for path, method, operation in routes:
        figures.methods += 1

        async def send(path: str = path, method: str = method, operation: Any = operation) -> None:
            await _one_rest(client, figures, malformed, path, method, operation)

        await sent(number, send)
        if figures.methods == 4:
            figures.warm()
    client.close()
    faults = figures.faults()
    assert not faults, "\n".join(faults)


async def _one_rest(
    client: RawHttp,
    figures: Figures,
    malformed: Malformed,
    path: str,
    method: str,
    operation: Any,
) -> None:
    draw = malformed.random
    named = {"run_id": ["made", "live", *TEXTS], "log": ["actor", *TEXTS]}
    for name, values in named.items():
        path = path.replace("{%s}" % name, quote(draw.choice(values)[:2000], safe=""))  # noqa: UP031
    names = [one["name"] for one in operation.get("parameters", []) if one["in"] == "query"]
    query = [
        (name, str(malformed.json(4))[:4000])
        for name in [*names, *draw.choices(["x", "step\0"], k=draw.choice((0, 0, 1)))]
        if draw.random() < 0.6
    ]
    content = b""
    if method == "post" and draw.random() < 0.9:
        body = malformed.json()
        if draw.random() < 0.6:
            fields = {
                "run_id": ["new", "made", "", "../x"],
                "recipe": WRONG_RECIPES,
                "overrides": [[], ["a.b=c"], ["run.steps=" + "[" * 99], ["x"] * 2000],
                "request_id": ["a", "", "x" * 200],
                "fencing_epoch": [1, 2**63, -1, 0.5],
                "step": [1, 2**31, None],
                "metrics": [{"a": 1}, {"a": "NaN"}, {"a": 1e300}, {}],
                "samples": [[], [{"row": 1}], [{}] * 100],
            }
            chosen = draw.sample(sorted(fields), draw.randrange(len(fields)))
            body = {name: draw.choice(fields[name]) for name in chosen}
        content = json.dumps(body).encode()
        drawn = draw.random()
        if drawn < 0.3:
            content = malformed.damaged_text(content.decode())
        elif drawn < 0.35:
            longest = (b"[" * 900_000, b"{}" * 600_000, b"\xff\xfe", b"1" * 10_000)
            (content,) = draw.choices(longest, (1, 1, 4, 4))
    headers = {"content-type": draw.choice(("application/json", "text/plain", "x", ""))}
    if draw.random() < 0.1:
        headers["last-event-id"] = draw.choice(("1-1", "x", "9" * 90, "1-", "-"))
    began = time.monotonic()
    target = f"{path}?{urlencode(query)}" if query else path
    answer = await client.ask(method.upper(), target, headers, content)
    figures.note(str(answer.status), began)
    is_problem = answer.headers.get("content-type") == "application/problem+json"
    if answer.status >= 500 or (answer.status >= 400 and not is_problem):
        text = answer.body[:300].decode()
        figures.wrong.append(f"{method} {target} {answer.status} {text} <- {content[:400]!r}")


# --- a few, and many --------------------------------------------------------------------------


async def test_a_few_malformed_requests_do_no_harm_to_a_role(tmp_path: Path) -> None:
    await fuzz_roles(tmp_path, ("actor", "reward"), FEW)


async def test_a_few_malformed_requests_do_no_harm_to_a_coordinator(tmp_path: Path) -> None:
    await fuzz_coordinator(tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.timeout(86_400)
async def test_many_malformed_requests_do_no_harm_to_any_role(tmp_path: Path) -> None:
    await fuzz_roles(tmp_path, ROLES, MANY)


@pytest.mark.slow
@pytest.mark.timeout(86_400)
async def test_many_malformed_requests_do_no_harm_to_a_coordinator(tmp_path: Path) -> None:
    await fuzz_coordinator(tmp_path, MANY)
