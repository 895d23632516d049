"""Whole weights on their way to servers, over vLLM's weight-transfer routes and NCCL.

The routes and their order are those of vLLM 0.32 with --weight-transfer-config
'{"backend": "nccl"}' and VLLM_SERVER_DEV_MODE=1. Not verified on a GPU: tested on fakes.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import Any

import torch

from rolemesh.engine.rollout.servers.client import (
    AnswerInvalidError,
    ServerClient,
    ServerRefusedError,
    ServerUnavailableError,
)
from rolemesh.engine.rollout.servers.senders import WeightSender

CHUNK_BYTES = 256 * 2**20
"""Weights that one /update_weights announces, and that are held beside the trainer's: a chunk ends
after the tensor that makes it so large."""

_REMEDY = (
    "start it with VLLM_SERVER_DEV_MODE=1 in its environment and --weight-transfer-config "
    '\'{"backend": "nccl"}\'; after an update that failed, start it anew'
)


class WeightBroadcast:
    """Sends whole weights to servers. Owner: one loop, on the compute thread.

    Invariant: an update reaches all servers that it is given, or fails; then some of them may have
    some of it, stay paused, and have to be started anew. The group of workers lives from one update
    to the next as long as the servers are the same.

    Example::

        broadcast = WeightBroadcast(sender, timeout_s=600)
        await broadcast.update(clients, weights, "3f1c-v7")
    """

    def __init__(self, sender: WeightSender, *, timeout_s: float) -> None:
        """Prepares; connects with the first update."""
        self._sender = sender
        self._timeout_s = timeout_s
        self._connected: tuple[str, ...] = ()
        """URLs of the servers in the group."""
        self._ever: set[str] = set()
        """URLs of servers that have been in one, and may still think that they are."""

    def disconnect(self) -> None:
        """Has the next update make a new group: a server is another process, or failed."""
        self._sender.abort()
        self._connected = ()

    async def update(
        self,
        clients: Sequence[ServerClient],
        weights: Iterable[tuple[str, torch.Tensor]],
        version: str,
    ) -> None:
        """Replaces every weight of some servers.

        Args:
            clients: The servers.
            weights: (Hugging Face name, [global shape]), in the type that travels, on the device of
                the sender. Read once.
            version: What the servers are to call it.

        Raises:
            ServerError: One refused, or could not be reached.
            BroadcastFailedError: The workers did not get them.
        """
        try:
            await self._connect(clients)
            await self._all(clients, "/pause?mode=keep")
            await self._all(clients, "/start_weight_update")
            for chunk in _chunks(weights):
                await self._send(clients, chunk)
            await self._all(clients, "/finish_weight_update", {"weight_version": version})
            await self._all(clients, "/reset_prefix_cache")
            await self._all(clients, "/resume")
        except BaseException:
            self.disconnect()
            raise

    async def _connect(self, clients: Sequence[ServerClient]) -> None:
        urls = tuple(client.url for client in clients)
        if urls == self._connected:
            return
        self.disconnect()
        for client in clients:
            if client.url in self._ever:
                await self._post(client, "/shutdown_weight_transfer_engine")
        sizes = [await self._world_size(client) for client in clients]
        world_size = 1 + sum(sizes)
        unique_id = self._sender.unique_id()
        offset, joins = 1, []
        for client, size in zip(clients, sizes, strict=True):
            info = {
                "rank_offset": offset,
                "world_size": world_size,
                "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
                "packed": False,
            }
            joins.append(self._post(client, "/init_weight_transfer_engine", {"init_info": info}))
            self._ever.add(client.url)
            offset += size
        # There is no barrier: all ranks have to enter together.
        await self._beside(
            asyncio.to_thread(
                self._sender.connect, unique_id, world_size, timeout_s=self._timeout_s
            ),
            joins,
        )
        self._connected = urls

    async def _send(
        self, clients: Sequence[ServerClient], chunk: Sequence[tuple[str, torch.Tensor]]
    ) -> None:
        info = {
            "names": [name for name, _ in chunk],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
            "shapes": [list(tensor.shape) for _, tensor in chunk],
        }

        def broadcast() -> None:
            for _, tensor in chunk:
                self._sender.broadcast(tensor)
            self._sender.wait(timeout_s=self._timeout_s)

        await self._beside(
            asyncio.to_thread(broadcast),
            [self._post(client, "/update_weights", {"update_info": info}) for client in clients],
        )

    async def _beside(self, sending: Awaitable[None], requests: Sequence[Awaitable[Any]]) -> None:
        """Waits for our end of the group and for the servers'; where one fails, ends all."""
        ours = asyncio.ensure_future(sending)
        theirs = [asyncio.ensure_future(request) for request in requests]
        try:
            done, _ = await asyncio.wait({ours, *theirs}, return_when=asyncio.FIRST_EXCEPTION)
            failed = [one for one in theirs if one in done and one.exception() is not None]
            for one in (*failed, *done):
                one.result()
        finally:
            for one in theirs:
                one.cancel()
            await asyncio.gather(*theirs, return_exceptions=True)
            if not ours.done():
                # Its thread waits for workers that will not come.
                self._sender.abort()
                await asyncio.gather(ours, return_exceptions=True)

    async def _all(
        self, clients: Sequence[ServerClient], route: str, body: dict[str, Any] | None = None
    ) -> None:
        await asyncio.gather(*(self._post(client, route, body) for client in clients))

    async def _post(
        self, client: ServerClient, route: str, body: dict[str, Any] | None = None
    ) -> bytes:
        try:
            return await client.post(route, body or {}, timeout_s=self._timeout_s)
        except ServerRefusedError as error:
            raise ServerRefusedError(
                f"{error}: {_REMEDY}", status=error.status, words=error.words
            ) from error
        except ServerUnavailableError as error:
            if error.status != 500:
                raise
            # An error within its engine, which would come again.
            raise ServerRefusedError(f"{error}: {_REMEDY}", status=500, words=str(error)) from error

    async def _world_size(self, client: ServerClient) -> int:
        route = "/get_world_size"
        try:
            text = await client.get(route, timeout_s=self._timeout_s)
        except ServerRefusedError as error:
            raise ServerRefusedError(
                f"{error}: {_REMEDY}", status=error.status, words=error.words
            ) from error
        answer = client.decoded(text, route)
        size = answer.get("world_size") if isinstance(answer, dict) else None
        if type(size) is not int or not 1 <= size <= 2**16:
            raise AnswerInvalidError(f"{client.url}{route} answered {text[:100]!r}: no world_size")
        return size


async def holds(client: ServerClient, version: str, *, timeout_s: float) -> bool:
    """Whether a server says that it holds an update; one that was started anew does not."""
    route = "/weight_info"
    answer = client.decoded(await client.get(route, timeout_s=timeout_s), route)
    return isinstance(answer, dict) and answer.get("weight_version") == version


def _chunks(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    chunk: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for name, tensor in weights:
        chunk.append((name, tensor.contiguous()))
        num_bytes += tensor.numel() * tensor.element_size()
        if num_bytes >= CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk
