"""A real server of Tinker's protocol on the test's own loop, and clients that speak its JSON.

The actor service behind it is a process. No socket is between client and server.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import psutil
import pytest
from support import warm_processes
from support.commands import command_of
from support.mesh_runs import tiny_model

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.tinker.models.actor_place import ActorPlace
from rolemesh.coordinator.tinker.routes.app import make_app
from rolemesh.coordinator.tinker.routes.keys import Keys
from rolemesh.coordinator.tinker.server import TinkerServer

Logprobs = Callable[[list[int]], npt.NDArray[np.float64]]
"""Of all tokens behind each token, [T, V]."""

NAME = "tiny"
"""Of the base."""
LONGEST = 128
"""Tokens of a sequence."""
MOST_RANK = 8
ANN, BOB = "tml-" + "a" * 16, "tml-" + "b" * 16
"""Keys of two owners."""
ADAM = {
    "learning_rate": 1e-2,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


_OF_CALL = ("prompt_logprobs", "topk_prompt_logprobs", "seq_id")
"""Fields of a call of asample; the others are its sampling_params."""


class RefusedError(AssertionError):
    """The server refused a call, or could not make what it had promised."""

    def __init__(self, status: int | str, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        """Of HTTP; or the category, where it was promised first."""
        self.text = text


def refusal(status: int | str, text: str = "") -> Any:
    """Within it a call is refused, with that status or category and a text like this one."""
    return pytest.raises(RefusedError, match=f"^{status}: .*{text}")


class TinkerClient:
    """One client, with a session of its own."""

    def __init__(self, app: Any, key: str = "") -> None:
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://tinker/api/v1/",
            headers={"X-API-Key": key, "Content-Type": "application/json"},
            timeout=None,
        )
        self.session_id = ""
        self._models = 0
        self._samples = 0

    async def call(
        self, route: str, body: Mapping[str, Any] | None = None, *, method: str = "POST"
    ) -> Any:
        """What a route answers; raises RefusedError."""
        # With NaN, as Python's own JSON writes it.
        sent = None if method == "GET" else json.dumps(body or {})
        response = await self._http.request(method, route, content=sent)
        if response.status_code >= 300:
            raise RefusedError(response.status_code, response.json()["error"])
        return response.json() if response.content else None

    async def result(self, promised: Mapping[str, Any]) -> Any:
        """What was promised; raises RefusedError where it could not be made."""
        while True:
            found = await self.call("retrieve_future", {"request_id": promised["request_id"]})
            if found.get("type") == "try_again":
                continue
            if "error" in found:
                raise RefusedError(found["category"], found["error"])
            return found

    async def made(self, route: str, body: Mapping[str, Any]) -> Any:
        """What a route promises, once it is there."""
        return await self.result(await self.call(route, body))

    async def begin(self) -> str:
        """Begins its session, if it has none; gives the id."""
        if not self.session_id:
            self.session_id = (await self.call("create_session", {"tags": []}))["session_id"]
        return self.session_id

    async def finish(self) -> None:
        """Ends its session, and with it its models."""
        if self.session_id:
            await self.call(f"sessions/{self.session_id}/finish", {"reason": {"type": "success"}})
            self.session_id = ""

    async def close(self) -> None:
        """Ends the client."""
        await self.finish()
        await self._http.aclose()

    def next_model(self) -> int:
        """The next model's number."""
        self._models += 1
        return self._models - 1

    async def create(self, *, base: str = NAME, **lora: Any) -> TinkerModel:
        """A new model."""
        made = await self.made(
            "create_model",
            {
                "session_id": await self.begin(),
                "model_seq_id": self.next_model(),
                "base_model": base,
                "lora_config": {"rank": 4, "seed": 1, **lora},
            },
        )
        return TinkerModel(self, made["model_id"])

    async def load(self, path: str, *, optimizer: bool) -> TinkerModel:
        """A new model with saved weights."""
        made = await self.made(
            "load_weights",
            {
                "session_id": await self.begin(),
                "model_seq_id": self.next_model(),
                "path": path,
                "optimizer": optimizer,
            },
        )
        return TinkerModel(self, made["model_id"])

    async def sampler(self, **of: str) -> str:
        """A sampling session of `base_model` or `model_path`."""
        self._samples += 1
        body = {"session_id": await self.begin(), "sampling_session_seq_id": 1000 + self._samples}
        made = await self.call("create_sampling_session", {**body, **of})
        sampler_id: str = made["sampling_session_id"]
        return sampler_id

    def sample_body(
        self, sampler_id: str, prompt: Sequence[int], num: int = 1, **asked: Any
    ) -> dict[str, Any]:
        """A call of asample; `asked` are sampling_params, or fields of the call."""
        self._samples += 1
        of_call: dict[str, Any] = {name: asked.pop(name) for name in _OF_CALL if name in asked}
        return {
            "sampling_session_id": sampler_id,
            "seq_id": self._samples,
            "num_samples": num,
            "prompt": model_input(prompt),
            "sampling_params": {"max_tokens": 8, **asked},
            **of_call,
        }

    async def sample(
        self, sampler_id: str, prompt: Sequence[int], num: int = 1, **asked: Any
    ) -> Any:
        """Samples behind a prompt."""
        return await self.made("asample", self.sample_body(sampler_id, prompt, num, **asked))


class TinkerModel:
    """A model of a client, whose calls it numbers."""

    def __init__(self, client: TinkerClient, model_id: str) -> None:
        self.client = client
        self.model_id = model_id
        self.seq_id = 0
        """Of the last call."""

    def numbered(self, **fields: Any) -> dict[str, Any]:
        """The body of the model's next call."""
        self.seq_id += 1
        return {"model_id": self.model_id, "seq_id": self.seq_id, **fields}

    def gradient_body(
        self,
        data: Sequence[Mapping[str, Any]],
        loss: str = "cross_entropy",
        *,
        forward_only: bool = False,
        **config: float,
    ) -> dict[str, Any]:
        """The body of the next forward_backward or forward."""
        inner = {"data": data, "loss_fn": loss, "loss_fn_config": config or None}
        name = "forward_input" if forward_only else "forward_backward_input"
        return self.numbered(**{name: inner})

    async def gradient(
        self, data: Sequence[Mapping[str, Any]], loss: str = "cross_entropy", **config: float
    ) -> Any:
        """Adds a gradient."""
        body = self.gradient_body(data, loss, forward_only=False, **config)
        return await self.client.made("forward_backward", body)

    async def forward(
        self, data: Sequence[Mapping[str, Any]], loss: str = "cross_entropy", **config: float
    ) -> Any:
        """The loss alone."""
        body = self.gradient_body(data, loss, forward_only=True, **config)
        return await self.client.made("forward", body)

    async def step(self, **numbers: float) -> dict[str, float]:
        """Applies the gradients."""
        body = self.numbered(adam_params={**ADAM, **numbers})
        metrics: dict[str, float] = (await self.client.made("optim_step", body))["metrics"]
        return metrics

    async def save(self, name: str, *, for_sampler: bool = False, **fields: Any) -> str:
        """Saves its weights; gives the path."""
        route = "save_weights_for_sampler" if for_sampler else "save_weights"
        made = await self.client.made(route, self.numbered(path=name, **fields))
        path: str = made["path"]
        return path

    async def sampler(self) -> str:
        """A sampling session of its weights as they are."""
        number = 5000 + self.seq_id
        body = self.numbered(sampling_session_seq_id=number)
        made = await self.client.made("save_weights_for_sampler", body)
        sampler_id: str = made["sampling_session_id"]
        return sampler_id

    async def load(self, path: str, *, optimizer: bool) -> None:
        """Takes saved weights."""
        body = self.numbered(path=path, optimizer=optimizer)
        await self.client.made("load_weights", body)

    async def unload(self) -> None:
        """Ends it."""
        await self.client.made("unload_model", {"model_id": self.model_id})


class TinkerWorld:
    """A server with its actor service."""

    def __init__(
        self, place: ActorPlace, server: TinkerServer, folder: Path, recipe: Recipe
    ) -> None:
        self.place = place
        self.server = server
        self.folder = folder
        self.recipe = recipe
        assert recipe.actor is not None
        self.model = recipe.actor.model.path
        """The base's folder."""
        self.app = make_app(server, Keys())

    def base_logprobs(self, folder: Path | None = None) -> Logprobs:
        """What the base, or the model of a folder, gives in float64, by transformers alone."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder or self.model, dtype=torch.float64)

        @torch.no_grad()
        def of(tokens: list[int]) -> npt.NDArray[np.float64]:
            return np.asarray(model(torch.tensor([tokens])).logits[0].log_softmax(-1))

        return of

    @asynccontextmanager
    async def client(self, app: Any = None, key: str = "") -> AsyncIterator[TinkerClient]:
        """A client, whose models end with it; of the app without keys, if none is given."""
        client = TinkerClient(app or self.app, key)
        try:
            yield client
        finally:
            await client.close()

    def kill_actor(self) -> None:
        """Ends the actor's process as `kill -9` does."""
        found = [
            one
            for one in psutil.Process().children()
            if {"rolemesh.services.actor", f"--folder={self.folder}"} <= set(command_of(one))
        ]
        assert len(found) == 1, found
        os.kill(warm_processes.forked(found[0].pid), signal.SIGKILL)

    def adapter(self, path: str, owner: str = "local") -> bytes:
        """The file with the matrices of saved weights."""
        return (self.files(path, owner) / "adapter_model.safetensors").read_bytes()

    def files(self, path: str, owner: str = "local") -> Path:
        """The folder of saved weights that others load."""
        saved, folder = self.server.store.find(owner, path)
        return folder / saved.shape.files


def tiny_recipe_of(model: Path) -> dict[str, Any]:
    """What a server needs to know of a model."""
    data = {"type": "reasoning_gym", "task": "chain_sum", "train_size": 1, "held_out_size": 1}
    return {
        "run": {"name": "tinker"},
        "algorithm": {"type": "external"},
        "actor": {
            "model": {"path": str(model), "compute_dtype": "float32"},
            "rollout": {"type": "hf", "max_model_len": LONGEST},
            "data": data,
        },
        "services": {"actor": {"threads": 1}},
    }


@asynccontextmanager
async def tinker_world(
    folder: Path, *, places: int = 4, trains_whole: bool = False
) -> AsyncIterator[TinkerWorld]:
    """A server on a tiny model; `places` are models and samplers at once."""
    model = tiny_model(folder / NAME)
    recipe = Recipe.model_validate(tiny_recipe_of(model))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in warm_processes.services().items():
            patch.setenv(name, value)
        async with (
            ActorPlace(recipe, folder, runs=places) as place,
            TinkerServer(
                place,
                recipe,
                folder,
                name=NAME,
                places=places,
                longest=LONGEST,
                most_rank=MOST_RANK,
                trains_whole=trains_whole,
            ) as server,
        ):
            yield TinkerWorld(place, server, folder, recipe)


def owners_app(world: TinkerWorld) -> Any:
    """The world's server for ann and bob, and for nobody else."""
    return make_app(world.server, Keys({ANN: "ann", BOB: "bob"}))


def server_of(
    world: TinkerWorld, *, folder: Path, session_s: float = 60.0, name: str = NAME, places: int = 3
) -> TinkerServer:
    """Another server on the same service."""
    return TinkerServer(
        world.place,
        world.recipe,
        folder,
        name=name,
        places=places,
        longest=LONGEST,
        most_rank=MOST_RANK,
        session_s=session_s,
    )


def model_input(tokens: Sequence[int]) -> dict[str, Any]:
    """Tokens as a client sends them."""
    return {"chunks": [{"type": "encoded_text", "tokens": list(map(int, tokens))}]}


def tensor(values: npt.ArrayLike, dtype: str = "float32") -> dict[str, Any]:
    """Numbers as a client sends them."""
    array = np.asarray(values)
    return {"data": array.reshape(-1).tolist(), "dtype": dtype, "shape": list(array.shape)}


def datum(
    tokens: Sequence[int], targets: npt.ArrayLike | None = None, **inputs: npt.ArrayLike
) -> dict[str, Any]:
    """A datum; without targets the last token is no input, and the rest predict their next."""
    if targets is None:
        tokens, targets = tokens[:-1], tokens[1:]
    return {
        "model_input": model_input(tokens),
        "loss_fn_inputs": {
            "target_tokens": tensor(targets, "int64"),
            **{name: tensor(values) for name, values in inputs.items()},
        },
    }


def logprobs(result: Mapping[str, Any]) -> list[npt.NDArray[np.float64]]:
    """Those of each datum, in their shapes."""
    told = [one["logprobs"] for one in result["loss_fn_outputs"]]
    return [np.asarray(one["data"]).reshape(one["shape"]) for one in told]
