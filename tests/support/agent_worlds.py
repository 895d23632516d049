"""A real sampler with its endpoint, and trajectories that agents play against it.

Loading vLLM takes many seconds: a file of tests has one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from support.agents import write_agents

from rolemesh.engine.data.prompts import Prompt
from rolemesh.engine.model_folders.pretrained import load_tokenizer
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.episodes.episode import Episode
from rolemesh.engine.rollout.factory import make_backend
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.sandbox.host import Sandbox, find_sandbox
from rolemesh.engine.sessions.runner import SessionRunner
from rolemesh.engine.specs import AgentSpec, EndpointSpec, SamplingSpec, VllmSpec
from rolemesh.services.endpoint.endpoint import Endpoint
from rolemesh.services.runtime.calls.compute import ComputeThread

Result = TypeVar("Result")

SAMPLING = SamplingSpec(samples_per_prompt=2, temperature=0.8, max_new_tokens=6)

ROWS = [
    {"prompt": f"count to {number}", "answer": str(number), "metadata": {"level": 3}}
    for number in range(2)
]


class World:
    """A sampler with an endpoint, on a compute thread of its own.

    It takes the model that lies in the folder, and has the agents of `write_agents` there.
    """

    def __init__(self, folder: Path) -> None:
        """Starts both."""
        self.folder = folder
        self.agents = write_agents(folder)
        self.tokenizer = load_tokenizer(folder / "model")
        self._compute = ComputeThread()
        self.backend: RolloutBackend
        self.endpoint: Endpoint
        self.metrics: dict[str, float] = {}
        self.notes: list[str] = []
        self.on_compute(self._start)

    def _start(self) -> None:
        spec = VllmSpec(dtype="float32", max_model_len=256, max_num_seqs=16)
        self.backend = make_backend(
            spec, self.folder / "model", folder_version=7, has_endpoint=True
        )
        self.endpoint = Endpoint(
            EndpointSpec(),
            self.backend,
            self._compute,
            bring_weights=lambda: None,
            may_sample=lambda: True,
        )

    def on_compute(self, fn: Callable[[], Result]) -> Result:
        """Runs a function on the sampler's thread."""

        async def run() -> Result:
            return await self._compute.run(fn)

        return asyncio.run(run())

    def close(self) -> None:
        """Ends both."""
        self.on_compute(lambda: (self.endpoint.close(), self.backend.close()))
        self._compute.close(10.0)

    def prompts(self, rows: Sequence[Mapping[str, Any]] = ROWS) -> list[Prompt]:
        """Prompts of rows: each has a prompt, an answer and metadata."""
        prompts = []
        for number, row in enumerate(rows):
            messages = [{"role": "user", "content": row["prompt"]}]
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            prompts.append(
                Prompt(
                    prompt_id=number,
                    text=text,
                    tokens=tokens,
                    answer=row["answer"],
                    metadata=json.dumps(row["metadata"]),
                    messages=messages,
                )
            )
        return prompts

    def play(
        self,
        spec: AgentSpec,
        sandbox: Sandbox | None = None,
        alive: Callable[[int], None] = lambda _: None,
        rows: Sequence[Mapping[str, Any]] = ROWS,
        sampling: SamplingSpec = SAMPLING,
    ) -> list[Sequence[Episode]]:
        """What two trajectories a row have become."""
        runner = SessionRunner(spec, sandbox or find_sandbox("auto"), self.endpoint)
        prompts = [prompt for prompt in self.prompts(rows) for _ in range(2)]
        requests = [
            RolloutRequest(row=row, prompt_tokens=prompt.tokens, seed=100 + row)
            for row, prompt in enumerate(prompts)
        ]
        try:
            played = self.on_compute(
                lambda: list(runner.run(self.backend, prompts, requests, sampling, alive))
            )
            self.metrics, self.notes = runner.metrics, runner.notes
            return played
        finally:
            runner.close()
            assert len(self.endpoint.sessions) == 0
            # Calls of agents that were given up end with their connections.
            calls = self.backend.endpoint_calls
            deadline = time.monotonic() + 30.0
            while calls is not None and not calls.is_empty and time.monotonic() < deadline:
                time.sleep(0.05)
            assert calls is not None
            assert calls.is_empty
