"""What servers are handed of each version of the weights, and how requests name it."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rolemesh.engine.rollout.checksums import tensor_checksum
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.servers.adapters import (
    KEPT,
    AdapterFolders,
    WrittenAdapter,
    load,
    names_at,
    unload,
)
from rolemesh.engine.rollout.servers.client import (
    ServerError,
    ServerRefusedError,
    ServerUnavailableError,
    WeightsLostError,
)
from rolemesh.engine.rollout.servers.fleet import Fleet, Server
from rolemesh.engine.rollout.servers.requests import Served
from rolemesh.engine.rollout.servers.senders import NcclSender, WeightSender
from rolemesh.engine.rollout.servers.weights import WeightBroadcast, holds
from rolemesh.engine.specs import AdapterSpec, VllmServerSpec
from rolemesh.engine.transport.cuda_queue import CudaQueue

_SHORT_S = 20.0
"""Time for a sign of life."""


class HeldWeights(ABC):
    """The newest weights, as servers hold them. Owner: the compute thread, with its loop.

    Invariant: what `served` names is one version of the weights, at every server that has been
    admitted since it came.
    """

    served = Served(model=None)
    """What requests name to have them; without any, they name what a server has by itself."""

    are_trained = True
    """Whether something learns from what they draw, by its log-probs."""

    @abstractmethod
    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """What `send` needs of an update's weights. Some read them only as they send them."""

    @abstractmethod
    async def send(self, fleet: Fleet, taken: Any, policy_version: int) -> None:
        """Hands an update to all servers that can be reached, and names it from here on.

        Raises:
            ServerError: One refused.
            SamplersUnavailableError: None can be reached.
            BroadcastFailedError: Whole weights did not reach the workers.
        """

    @abstractmethod
    async def bring(self, server: Server) -> None:
        """Sees to it that a server that is admitted has them.

        Raises:
            ServerError: It cannot have them.
        """

    @abstractmethod
    async def look(self, fleet: Fleet) -> None:
        """Before requests: has servers admitted anew that have lost the weights unnoticed."""

    def refusal(self, server: Server, error: ServerRefusedError) -> ServerError:
        """What it means that a server refused a request which names them."""
        return error

    @abstractmethod
    def checksums(self) -> Mapping[str, str]:
        """SHA-256 (hex) of each parameter."""

    @abstractmethod
    async def close(self, fleet: Fleet) -> None:
        """Has the servers forget what they were handed, as far as they can be reached."""


class HeldAdapter(HeldWeights):
    """An adapter in a folder, which each server loads by itself."""

    def __init__(self, folders: AdapterFolders, spec: VllmServerSpec) -> None:
        self._folders = folders
        self._timeout_s = spec.update_timeout_s
        self._kept: list[WrittenAdapter] = []
        """At the servers, the newest last."""
        self._is_written = False

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Copies of the factors, float32 on the host.

        Raises:
            WeightsStaleError: One is not finite. A server that has computed with NaN gives NaN for
                other adapters, too, until it is started anew (vLLM 0.32 on a CPU).
        """
        taken = {
            name: tensor.to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format)
            for name, tensor in weights
        }
        for name, tensor in taken.items():
            if not torch.isfinite(tensor).all():
                raise WeightsStaleError(
                    f"weight update has {name!r} with NaN or infinite values, which the servers "
                    "would not get rid of: look at the step before, e.g. at its learning rate"
                )
        return taken

    async def send(self, fleet: Fleet, taken: Any, policy_version: int) -> None:
        """Writes and has it loaded; drops what is older than the one before."""
        written = self._folders.write(taken, policy_version)
        before = self._kept[-1:]
        # From here on, also where a server fails: what comes back is brought this one.
        self._kept = [*(one for one in self._kept if one.name != written.name), written]
        self.served = Served(model=written.name)

        async def renew(server: Server) -> None:
            known = await names_at(server.client, timeout_s=_SHORT_S)
            if written.name not in known:
                if any(one.name not in known for one in before):
                    # Started anew while nothing was asked of it: maybe with other flags.
                    raise self._lost(server, before[0].name)
                await self.bring(server)

        await fleet.on_some(renew)
        dropped, self._kept = self._kept[:-KEPT], self._kept[-KEPT:]
        await self._drop(fleet, dropped)

    async def bring(self, server: Server) -> None:
        """Has it load the newest."""
        if not self._kept:
            return
        newest = self._kept[-1]
        # Another rank of this service may have dropped it.
        self._folders.restore(newest)
        await load(
            server.client,
            newest.name,
            self._folders.server_path(newest),
            timeout_s=self._timeout_s,
        )

    async def look(self, fleet: Fleet) -> None:
        """Does nothing: a server refuses requests that name what it lost."""

    def refusal(self, server: Server, error: ServerRefusedError) -> ServerError:
        """A server that does not know the adapter was started anew, and can have it again."""
        return self._lost(server, self.served.model) if error.status == 404 else error

    def _lost(self, server: Server, name: str | None) -> WeightsLostError:
        return WeightsLostError(
            f"{server.url} has lost adapter {name!r}, as one that was started anew has", status=404
        )

    def checksums(self) -> Mapping[str, str]:
        """Of each factor as it was sent."""
        return {name: tensor_checksum(one) for name, one in self._kept[-1].factors.items()}

    async def close(self, fleet: Fleet) -> None:
        """Unloads all, and removes their folders."""
        dropped, self._kept = self._kept, []
        await self._drop(fleet, dropped)

    async def _drop(self, fleet: Fleet, dropped: Iterable[WrittenAdapter]) -> None:
        for written in dropped:
            await asyncio.gather(
                *(unload(one.client, written.name) for one in fleet.servers if one.is_admitted)
            )
            self._folders.remove(written)


class HeldWhole(HeldWeights):
    """Whole weights in the servers' own memory. Not verified on a GPU.

    A server that was started anew has those of its folder, and is left alone until the next update.
    """

    def __init__(
        self, broadcast: WeightBroadcast | None, spec: VllmServerSpec, *, token: str, device: Any
    ) -> None:
        """Takes what sends; None on ranks that only pass their part on."""
        self._broadcast = broadcast
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._token = token
        self._device = device
        self._numbers = itertools.count()

    def take(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights in the type that travels, as they come."""
        return ((name, one.to(self._device, self._dtype)) for name, one in weights)

    async def send(self, fleet: Fleet, taken: Any, policy_version: int) -> None:
        """Broadcasts them to those that answer; on other ranks than the first, only reads them."""
        self.served = Served(model=None)
        # Versions may come again with other weights: no number does, and all ranks count alike.
        version = f"{self._token}-v{policy_version}-{next(self._numbers)}"
        if self._broadcast is None:
            for _ in taken:
                pass
        else:
            reached = await fleet.on_some(_that_answers)
            await self._broadcast.update([one.client for one in reached.values()], taken, version)
        self.served = Served(model=None, salt=version)

    async def bring(self, server: Server) -> None:
        """Only looks: one server cannot have them by itself."""
        if self.served.salt is None:
            return
        if not await holds(server.client, self.served.salt, timeout_s=_SHORT_S):
            if self._broadcast is not None:
                self._broadcast.disconnect()
            raise ServerUnavailableError(
                f"{server.url} was started anew, and gets weights with the next update"
            )

    async def look(self, fleet: Fleet) -> None:
        """Asks each server whether it holds them."""
        await fleet.on_each(self.bring)

    def checksums(self) -> Mapping[str, str]:
        """None are kept."""
        raise NotImplementedError(
            "rollout type vllm_server has no checksums of whole weights, which lie at the servers"
        )

    async def close(self, fleet: Fleet) -> None:
        """Leaves the group of the workers."""
        if self._broadcast is not None:
            self._broadcast.disconnect()


class OwnWeights(HeldWeights):
    """What servers have by themselves, and keep: of a policy that is asked, and not trained."""

    are_trained = False

    def __init__(self, served: Served) -> None:
        """Takes what requests name."""
        self.served = served

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Refuses: RuntimeError."""
        raise RuntimeError("weights came for servers that keep their own: a bug, please report it")

    async def send(self, fleet: Fleet, taken: Any, policy_version: int) -> None:
        """Has nothing to send."""

    async def bring(self, server: Server) -> None:
        """Has nothing to bring."""

    async def look(self, fleet: Fleet) -> None:
        """Does nothing: a server that was started anew has the same again."""

    def checksums(self) -> Mapping[str, str]:
        """None are known."""
        raise NotImplementedError("what servers have by themselves has no checksums here")

    async def close(self, fleet: Fleet) -> None:
        """Leaves the servers as they are."""


async def _that_answers(server: Server) -> Server:
    await server.client.get("/health", timeout_s=_SHORT_S)
    return server


def held_weights(
    spec: VllmServerSpec,
    base: Path,
    adapter: AdapterSpec | None,
    *,
    token: str,
    device: torch.device | None,
    sender: WeightSender | None,
    is_sending: bool,
) -> HeldWeights:
    """The way that weights take to servers.

    Args:
        spec: Of the sampler.
        base: Folder of the model.
        adapter: What is trained; None: all of the model.
        token: Of the ranks of this service together, and of nobody else.
        device: Of this rank.
        sender: Of whole weights; None: NCCL.
        is_sending: Whether this rank sends whole weights.

    Raises:
        ValueError: There is no way from here.
    """
    if adapter is not None:
        if spec.shared_folder is None:
            raise ValueError(
                "rollout.shared_folder is not given, though an adapter is trained: name a folder "
                "that this service may write to and the servers of rollout.urls may read"
            )
        folders = AdapterFolders(spec.shared_folder, spec.server_folder, adapter, base, token=token)
        return HeldAdapter(folders, spec)
    if sender is None and (device is None or device.type != "cuda"):
        raise ValueError(
            f"rollout.type is 'vllm_server', and the policy is trained as a whole on "
            f"{device or 'cpu'}: whole weights go to servers by NCCL, from a GPU alone; train an "
            "adapter (actor.model.adapter), or take rollout type vllm or hf"
        )
    if not is_sending:
        return HeldWhole(None, spec, token=token, device=device)
    if sender is None:
        assert device is not None
        sender = NcclSender(CudaQueue(device), device)
    broadcast = WeightBroadcast(sender, timeout_s=spec.update_timeout_s)
    return HeldWhole(broadcast, spec, token=token, device=device)
