"""Malformed requests to every method of every role, and every route of a coordinator.

Nothing crashes or hangs, each is answered with a status that says what is wrong with it, a service
keeps its run, and memory stays flat. `make fuzz MESSAGES=10000` sends so many to each method and
route and leaves a line of figures for each server in build/fuzz.jsonl; `make test` sends a few.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import httpx
import psutil
import pytest
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from support.fake_run import fill_store
from support.learning_runs import service_processes
from support.malformed import TEXTS, Known, Malformed
from support.mesh_runs import tiny_recipe
from support.services import operation_key
from support.tiny_models import write_tiny_classifier, write_tiny_llama

from rolemesh.coordinator.state.embedded import EmbeddedValkey
from rolemesh.coordinator.state.redis import RedisStateStore
from rolemesh.rpc.channel import open_channel
from rolemesh.rpc.limits import MAX_EPOCH_JUMP, MAX_ROWS, MAX_TRAINED_ROWS
from rolemesh.rpc.policy import rolemesh_methods
from rolemesh.rpc.references import join_references, shards_of
from rolemesh.rpc.service_client import ServiceClient
from rolemesh.rpc.tensors import data_type_of
from rolemesh.v1 import experience_pb2, rollout_pb2, worker_pb2

FEW = 8
"""Messages for each method and route in `make test`."""

MANY = int(os.environ.get("FUZZ_MESSAGES", "200"))
"""The same in `make test-slow`; `make fuzz` sets it."""

REPORT = os.environ.get("FUZZ_REPORT", "")

ROLES = ("actor", "critic", "reference", "reward", "cost", "rollout")
SEED = 20261123
RUN = "run"
AT_ONCE = 8
"""Calls that one server has at the same time."""

PATIENCE_S = 60.0
"""A call without an answer for so long hangs."""

SENT_TOO_LATE = "Internal error from Core"
"""What a client of gRPC says by itself where its stream is refused while it still sends; such an
end says nothing of the status that the server gave."""

WATCH_S = 0.2
"""A watch goes on until its caller has had enough."""

MOST_WORK = 64
"""Rows that a call may make a tiny model work on: what is allowed and slow is no matter here."""

MOST_GROWTH_BYTES = 160 << 20
"""Resident memory at the end, against that when the servers are warm: experience that calls have
made is held (32 MiB), and so are the answers to 1,024 operations."""

RIGHT = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}


@dataclass
class Figures:
    """What one server answered."""

    server: str
    pid: int
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Requests whose answer was none of the right ones."""
    before_bytes: int = 0
    longest_s: float = 0.0
    methods: int = 0
    began: float = field(default_factory=time.monotonic)

    def warm(self) -> None:
        """Notes the memory of the process once it has worked."""
        self.before_bytes = self.resident_bytes

    @property
    def resident_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    def note(self, status: str, began: float) -> None:
        self.statuses[status] += 1
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    def faults(self) -> list[str]:
        """Tells the figures; returns what was not right."""
        after_bytes = self.resident_bytes
        line = json.dumps(
            {
                "benchmark": "fuzz",
                "server": self.server,
                "methods": self.methods,
                "messages": self.statuses.total(),
                "statuses": dict(self.statuses.most_common()),
                "wrong": len(self.wrong),
                "longest_s": round(self.longest_s, 2),
                "seconds": round(time.monotonic() - self.began, 1),
                "resident_before_mib": self.before_bytes >> 20,
                "resident_after_mib": after_bytes >> 20,
            }
        )
        print(line)
        if REPORT:
            with Path(REPORT).open("a") as report:
                report.write(line + "\n")
        grown_bytes = after_bytes - self.before_bytes
        is_flat = grown_bytes < MOST_GROWTH_BYTES
        grown = [] if is_flat else [f"{self.server} has grown by {grown_bytes >> 20} MiB"]
        return [*self.wrong[:20], *grown]


async def sent(number: int, send: Callable[[], Any]) -> None:
    """Sends so many requests, AT_ONCE at a time."""
    left = iter(range(number))

    async def one_after_another() -> None:
        for _ in left:
            await send()

    await asyncio.gather(*(one_after_another() for _ in range(min(AT_ONCE, number))))


# --- gRPC -------------------------------------------------------------------------------------


class Fuzzed:
    """A gRPC server that is sent malformed requests."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        figures: Figures,
        malformed: Malformed,
        is_harmful: Callable[[str, Message], bool],
    ) -> None:
        self._channel = channel
        self._figures = figures
        self._malformed = malformed
        self._is_harmful = is_harmful

    async def method(self, path: str, number: int) -> None:
        """Sends so many to one method."""
        self._figures.methods += 1
        await sent(number, lambda: self._one(path))

    async def _one(self, path: str) -> None:
        described = rolemesh_methods()[path]
        kind = GetMessageClass(described.input_type)
        while True:
            data = self._malformed.request(described.input_type)
            try:
                if not self._is_harmful(path, kind.FromString(data)):
                    break
            except DecodeError:
                break
        began, answer = time.monotonic(), "?"
        is_watch = path.endswith("/WatchRun")
        timeout_s = WATCH_S if is_watch else PATIENCE_S
        try:
            if path.endswith("/Put"):
                parts = [data, *self._chunks()]
                await self._channel.stream_unary(path)(_iterated(parts), timeout=timeout_s)
            elif described.server_streaming:
                async for _ in self._channel.unary_stream(path)(data, timeout=timeout_s):
                    pass
            else:
                await self._channel.unary_unary(path)(data, timeout=timeout_s)
            code, answer = grpc.StatusCode.OK, ""
        except grpc.aio.AioRpcError as error:
            code, answer = error.code(), str(error.details())
        if answer == SENT_TOO_LATE and path.endswith("/Put"):
            self._figures.note("REFUSED_WHILE_SENDING", began)
            return
        self._figures.note(code.name, began)
        is_right = code in RIGHT or (is_watch and code is grpc.StatusCode.DEADLINE_EXCEEDED)
        # A peer whose address is none is a service that is away.
        is_right = is_right or (code is grpc.StatusCode.UNAVAILABLE and "127.0.0.1:1" in answer)
        if not is_right:
            self._figures.wrong.append(f"{path} {code.name}: {answer[:300]} <- {data[:400]!r}")

    def _chunks(self) -> list[bytes]:
        draw = self._malformed.random
        number = draw.choice((0, 1, 1, 1, 2, 3))
        sizes = [draw.choice((0, 1, 64, 192, 448, 4096, 2 << 20)) for _ in range(number)]
        chunks = [
            experience_pb2.PutRequest(chunk=bytes(size)).SerializeToString() for size in sizes
        ]
        return [draw.randbytes(9) if draw.random() < 0.1 else chunk for chunk in chunks]


async def _iterated(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def inner_messages(message: Message) -> Iterator[Any]:
    """The message and all of ours that it holds."""
    yield message
    for each, value in message.ListFields():
        if each.message_type is None or each.message_type.file.package != "rolemesh.v1":
            continue
        if each.message_type.GetOptions().map_entry:
            continue
        for inner in value if each.is_repeated else [value]:
            yield from inner_messages(inner)


def is_harmful(path: str, request: Any, known: Known) -> bool:
    """Whether a request is no malformed one, but right and bad for the test.

    It would end the run, fence the test off, write into some folder of the machine, call some
    address, or have a model work for minutes.
    """
    method = path.rpartition("/")[2]
    for message in inner_messages(request):
        kind = message.DESCRIPTOR.name
        most = 2**63 if method == "Attach" else 1 + MAX_EPOCH_JUMP
        is_mine = kind == "OperationKey" and message.run_id == RUN
        if is_mine and 1 < message.fencing_epoch <= most:
            return True
        if "directory" in message.DESCRIPTOR.fields_by_name:
            directory = message.directory
            if directory.startswith("/") and directory not in known.values["directory"]:
                return True
        addresses = [message.address] if kind == "Shard" else []
        addresses += message.addresses if kind == "WeightsRef" else []
        if any(":" in one and one not in known.values["address"] for one in addresses):
            return True
    if method in ("Drain", "Release", "DropCuts") and request.run_id == RUN:
        return method != "Release" or 1 <= request.fencing_epoch <= 1 + MAX_EPOCH_JUMP
    if method == "Drain":
        return bool(request.exit) or not request.run_id
    if method == "Generate":
        rows = (request.prompts.count or len(request.given.prompts)) * max(
            1, request.sampling.samples_per_prompt
        )
        return bool(rows * request.sampling.max_new_tokens > MOST_WORK and 0 < rows <= MAX_ROWS)
    if method == "ReadBatch":
        return bool(2 * request.rows.count > MOST_WORK and request.rows.count <= MAX_ROWS)
    if method == "Update":
        rows = request.epochs * request.experience.num_rows
        return bool(MOST_WORK < rows <= MAX_TRAINED_ROWS)
    return False


# --- roles ------------------------------------------------------------------------------------


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


async def known_of(clients: Mapping[str, ServiceClient], folder: Path) -> Known:
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
            "directory": [str(folder / "saved"), "saved", ""],
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


async def fuzz_roles(folder: Path, names: tuple[str, ...], number: int) -> None:
    """Sends so many to every method of every role, before it holds a run and while it does."""
    specs = specs_of(folder)
    capacity = ("--experience-capacity-bytes", str(32 << 20))
    with service_processes(folder, names, *capacity) as addresses:
        channels = {name: open_channel(address) for name, address in addresses.items()}
        bare = {name: grpc.aio.insecure_channel(address) for name, address in addresses.items()}
        clients = {name: ServiceClient(channel) for name, channel in channels.items()}
        told = {name: await client.get_capabilities() for name, client in clients.items()}
        figures = {name: Figures(name, told[name].pid) for name in names}
        idle = Known(values={"run_id": ["other"], "directory": [], "address": []})
        for name in names:
            fuzzed = Fuzzed(
                bare[name],
                figures[name],
                Malformed(SEED, idle),
                lambda path, request: is_harmful(path, request, idle),
            )
            for method in ("Initialize", "Attach"):
                await fuzzed.method(f"/rolemesh.v1.WorkerService/{method}", number)
        for name, client in clients.items():
            await client.initialize(operation_key("initialize"), specs[name], 3)
        known = await known_of(clients, folder)
        heard = asyncio.create_task(_heard(clients))
        for name in names:
            fuzzed = Fuzzed(
                bare[name],
                figures[name],
                Malformed(SEED + 1, known),
                lambda path, request: is_harmful(path, request, known),
            )
            mine = [
                path for path in rolemesh_methods() if path.split("/")[1] in told[name].services
            ]
            assert len(mine) > 10
            for path in sorted(mine, key=lambda path: path.endswith(("/Release", "/DropCuts"))):
                if path.endswith("/Initialize"):
                    continue
                await fuzzed.method(path, number)
                if path.endswith("/Sleep"):
                    await clients[name].wake(operation_key("wake"))
                if not figures[name].before_bytes:
                    figures[name].warm()
            status = await clients[name].get_status(RUN)
            assert (status.run_id, status.failure) == (RUN, ""), name
            assert status.state != worker_pb2.WORKER_STATE_FAILED
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
            *("--store-url", server.url),
            env={k: v for k, v in os.environ.items() if not k.startswith("ROLEMESH_")},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            assert process.stdout is not None
            facts = json.loads(await process.stdout.readline())
            await fuzz_service(facts["address"], process.pid, number)
            await fuzz_rest(facts["url"].rstrip("/"), process.pid, number)
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


async def fuzz_rest(url: str, pid: int, number: int) -> None:
    figures, malformed = Figures("coordinator (REST)", pid), Malformed(SEED, Known())
    draw = malformed.random
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        document = (await client.get("/openapi.json")).json()
        routes = [
            (path, method, operation)
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
        ]
        for path, method, operation in routes:
            figures.methods += 1

            async def send(
                path: str = path, method: str = method, operation: Any = operation
            ) -> None:
                await _one_rest(client, figures, malformed, path, method, operation)

            await sent(number, send)
            if figures.methods == 4:
                figures.warm()
    assert draw is malformed.random
    faults = figures.faults()
    assert not faults, "\n".join(faults)


async def _one_rest(
    client: httpx.AsyncClient,
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
            content = draw.choice((b"[" * 900_000, b"{}" * 600_000, b"\xff\xfe", b"1" * 10_000))
    headers = {"content-type": draw.choice(("application/json", "text/plain", "x", ""))}
    if draw.random() < 0.1:
        headers["last-event-id"] = draw.choice(("1-1", "x", "9" * 90, "1-", "-"))
    began = time.monotonic()
    request = client.build_request(
        method.upper(), path, params=query, content=content, headers=headers
    )
    answer = await client.send(request, stream=True)
    try:
        is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        text = "" if is_stream else (await answer.aread()).decode()
    finally:
        await answer.aclose()
    figures.note(str(answer.status_code), began)
    is_problem = answer.headers.get("content-type") == "application/problem+json"
    if answer.status_code >= 500 or (answer.status_code >= 400 and not is_problem):
        figures.wrong.append(
            f"{request.method} {request.url} {answer.status_code} {text[:300]} <- {content[:400]!r}"
        )


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
