"""One sampler behind endpoints: a tiny model that knows ChatML, tools and thoughts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from openai import OpenAI
from support.in_flight_checks import scores_by_version
from support.rollout_checks import load_trainer_model, perturb
from support.tiny_models import tiny_tokenizer, write_tiny_llama
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rolemesh.engine.rollout.endpoint.calls import EndpointCalls
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.vllm.sampler import VllmBackend
from rolemesh.engine.specs import EndpointSpec, ImagesSpec, VllmSpec
from rolemesh.rpc.loop_thread import LoopThread
from rolemesh.services.endpoint.endpoint import Endpoint
from rolemesh.services.runtime.calls.compute import ComputeThread

Result = TypeVar("Result")

MAX_MODEL_LEN = 512
FIRST_VERSION = 3
LETTERS = list(tiny_tokenizer().convert_tokens_to_ids(list("abcdefghijk")))
"""Token ids of single letters. Each two of them are a token as well."""
PATIENCE_S = 60.0
"""For what takes a moment."""

TEMPLATE = r"""
{%- if tools %}{{ '<|im_start|>system\nTools: ' + tools|tojson + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}
{{- (message.content or '').split('</think>')[-1] }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments|tojson + '}\n</tool_call>' }}
{%- endfor %}
{%- else %}{{ message.content }}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
"""ChatML. Shows tools, and leaves what was thought out of earlier answers."""

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


def write_model(folder: Path) -> Path:
    """A tiny model with two tokens around what it thinks."""
    write_tiny_llama(folder, max_position_embeddings=MAX_MODEL_LEN)
    tokenizer = tiny_tokenizer(510)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


class Sampler:
    """A back end on its compute thread, with weights of several versions. Tests have one thread.

    Each endpoint of it has calls of its own; one is used at a time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compute = ComputeThread()
        self._loop = LoopThread("sampler", "sampler")
        self.models = {FIRST_VERSION: load_trainer_model(folder)}
        spec = VllmSpec(dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=8)
        backend = self.do(lambda: make_backend(spec, folder, has_endpoint=True))
        assert isinstance(backend, VllmBackend)
        self.backend = backend
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.update(FIRST_VERSION)

    def do(self, fn: Callable[[], Result]) -> Result:
        """Runs a function on the compute thread."""
        return self._loop.run(self.compute.run(fn))

    def model(self, version: int) -> PreTrainedModel:
        """The weights of a version: each has others."""
        if version not in self.models:
            model = load_trainer_model(self.folder)
            perturb(model, seed=version)
            self.models[version] = model
        return self.models[version]

    def load(self, version: int) -> None:
        """Updates the weights, on the compute thread."""
        self.backend.update_weights(self.model(version).named_parameters(), version)

    def update(self, version: int) -> None:
        """Updates the weights, from elsewhere."""
        self.do(lambda: self.load(version))

    @property
    def num_in_engine(self) -> int:
        """Requests that have not ended there."""
        return len(self.backend._scheduled)

    def scores(
        self, prompt: Sequence[int], completion: Sequence[int], versions: Sequence[int]
    ) -> list[float]:
        """Log-prob of each token under the version that is said to have sampled it."""
        for version in versions:
            self.model(version)
        found: list[float] = scores_by_version(self.models, prompt, completion, versions).tolist()
        return found

    def close(self) -> None:
        """Ends the engine and the threads."""
        self.do(self.backend.close)
        self._loop.close(PATIENCE_S)
        self.compute.close(PATIENCE_S)


class Served:
    """An endpoint and its clients."""

    def __init__(self, sampler: Sampler, endpoint: Endpoint, may_sample: threading.Event) -> None:
        self.sampler = sampler
        self.endpoint = endpoint
        self.may_sample = may_sample
        """While it is not set, calls wait as they do while the service sleeps."""
        self.http = httpx.Client(base_url=endpoint.url, timeout=PATIENCE_S)
        self.openai = OpenAI(
            base_url=f"{endpoint.url}/v1", api_key="any", timeout=PATIENCE_S, max_retries=0
        )

    def session(self, **given: Any) -> Session:
        """A new session."""
        answer = self.http.post("/sessions", json=given)
        assert answer.status_code == 201, answer.text
        return Session(self, answer.json())

    def close(self) -> None:
        """Closes the clients."""
        self.http.close()
        self.openai.close()


class Session:
    """A session of an endpoint, with a client that uses its base URL and its key."""

    def __init__(self, served: Served, opened: Mapping[str, str]) -> None:
        self.session_id = opened["session_id"]
        self.base_url, self.key = opened["base_url"], opened["key"]
        self._http = served.http
        self.client = OpenAI(
            base_url=self.base_url, api_key=self.key, timeout=PATIENCE_S, max_retries=0
        )

    def read(self) -> dict[str, Any]:
        """What is kept of it."""
        found: dict[str, Any] = self._http.get(f"/sessions/{self.session_id}").json()
        return found

    def chat(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> Any:
        """A chat completion; what the openai client does not know goes in its extra body."""
        own = {"seed", "n", "stop", "max_tokens", "temperature", "tools", "tool_choice", "metadata"}
        given = {name: more.pop(name) for name in own & set(more)}
        return self.client.chat.completions.create(
            model="policy", messages=list(messages), extra_body=more, **given
        )

    def tokenize(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """What its own /tokenize answers about messages."""
        answer = self._http.post(
            f"/sessions/{self.session_id}/tokenize", json={"messages": list(messages), **more}
        )
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def whole(self, number: int) -> list[int]:
        """All tokens of a call's prompt, and those it sampled."""
        calls = self.read()["calls"]
        tokens: list[int] = []
        at: int | None = number
        while at is not None:
            call = calls[at]
            tokens = [*call["added_tokens"], *call["sampled_tokens"], *tokens]
            at = call["parent"]
        return tokens


@contextmanager
def serving_endpoint(
    sampler: Sampler, *, image_bounds: Sequence[ImagesSpec] = (), **spec: Any
) -> Iterator[Served]:
    """An endpoint of the sampler."""
    may_sample = threading.Event()
    may_sample.set()
    # Those of an endpoint that was closed have ended for good; one that lasts gets its own back.
    before = sampler.backend.endpoint_calls
    sampler.backend.endpoint_calls = EndpointCalls()
    try:
        endpoint = sampler.do(
            lambda: Endpoint(
                EndpointSpec(**spec),
                sampler.backend,
                sampler.compute,
                bring_weights=lambda: None,
                may_sample=may_sample.is_set,
                image_bounds=image_bounds,
            )
        )
        served = Served(sampler, endpoint, may_sample)
        try:
            yield served
        finally:
            sampler.backend.between_steps = None
            sampler.do(endpoint.close)
            served.close()
    finally:
        sampler.backend.endpoint_calls = before


@contextmanager
def halted(sampler: Sampler) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Stops the sampler before each of its steps: (it has stopped, let it go on)."""
    has_stopped, goes_on = threading.Event(), threading.Event()

    def between_steps() -> None:
        has_stopped.set()
        assert goes_on.wait(PATIENCE_S)

    sampler.backend.between_steps = between_steps
    try:
        yield has_stopped, goes_on
    finally:
        goes_on.set()
        sampler.backend.between_steps = None


def wait_until(holds: Callable[[], bool]) -> None:
    """Waits for what has to come, with a bound that no machine needs."""
    for _ in range(int(PATIENCE_S / 0.01)):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come")
