"""Keys and values of a prompt, computed once for all completions of it that a vLLM engine samples.

Imports vLLM, so it is itself imported late. VLLM shares whole blocks of tokens alone. On a CPU a
block has 32, so that a completion of its own computes up to 32 tokens of a prompt that its siblings
compute as well; where prompts are short, that is a quarter of a generation's time. Here a request
whose prompt another one has in the engine takes over all of it but the last token, by a copy of
blocks. It is a KV connector, vLLM's place for keys that come from elsewhere, and moves them from
block to block of the same cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_Prompt = tuple[object, ...]
"""All that the keys of a prompt depend on, beside the engine's weights and its one adapter."""


def transfer_config() -> KVTransferConfig:
    """What vLLM's EngineArgs need as `kv_transfer_config` to have prompts shared."""
    return KVTransferConfig(
        kv_connector=SharedPrompts.__name__,
        kv_connector_module_path=__name__,
        # Of an engine that is told to take keys, vLLM expects that images may lack features.
        kv_role="kv_producer",
    )


@dataclass(frozen=True, slots=True)
class _Taken:
    """Tokens whose keys a request takes over: those from `start` to `end`."""

    source: Request
    start: int
    end: int


class SharedPrompts(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The half of the connector in vLLM's scheduler, which does all of it.

    The first request with a prompt computes it. The others wait until the step after, and take it
    over. Nothing is kept: a prompt is shared while a request that has it runs. Models with more
    than full attention (windows, states) share nothing here, since their caches are of several
    kinds. Owned by the compute thread.

    VLLM makes another one for its worker, one a process, and with a second engine in the process
    that one belongs to the first, or to none. So it does nothing, and the scheduler's copies: it is
    in the same process, and a step begins when all before it have ended.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        # A subclass may be of another layout.
        self._shares = len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec
        self._block_size: int = groups[0].kv_cache_spec.block_size if groups else 0
        self._layers: list[str] = list(groups[0].layer_names) if self._shares else []
        self._requests: dict[_Prompt, dict[str, Request]] = {}
        """Those in the engine, by prompt and id."""
        self._taken: dict[str, _Taken] = {}
        """What was answered to vLLM, which may have no blocks for it."""
        self._followers: set[str] = set()
        """Requests whose blocks are copied to in this step, and so not from."""
        self._sources: list[int] = []
        """Blocks that are copied before this step."""
        self._targets: list[int] = []
        """To where."""

    @property
    def requires_kv_delivery(self) -> bool:
        """False: nothing leaves the engine."""
        return False

    # Scheduler

    def on_new_request(self, request: Request) -> None:
        """Knows of a request that came."""
        if self._shares and request.prompt_token_ids is not None:
            self._requests.setdefault(_prompt_of(request), {})[request.request_id] = request

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens are taken over behind those of whole blocks; None: ask in the next step.

        A request that was put back takes over its prompt alone, not its completion.
        """
        if not self._shares or request.prompt_token_ids is None:
            return 0, False
        # From the keys of the last token its successor is drawn: that one is computed in any case.
        end = min(request.num_prompt_tokens, request.num_tokens - 1)
        running = self._running(request)
        if end <= num_computed_tokens or not running:
            return 0, False
        source = next((other for other in running if other.num_computed_tokens >= end), None)
        if source is None:
            return None, False
        self._taken[request.request_id] = _Taken(source, num_computed_tokens, end)
        return end - num_computed_tokens, False

    def _running(self, request: Request) -> list[Request]:
        """Those that compute its prompt, or have."""
        return [
            other
            for other in self._requests[_prompt_of(request)].values()
            if other.status == RequestStatus.RUNNING and other.request_id not in self._followers
        ]

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Notes which blocks are copied, now that the request has its own."""
        taken = self._taken.pop(request.request_id, None)
        if taken is None or not num_external_tokens:
            return
        assert self._kv_cache_manager is not None  # vLLM binds it before the first request
        first, last = taken.start // self._block_size, (taken.end - 1) // self._block_size
        (theirs,) = self._kv_cache_manager.get_block_ids(taken.source.request_id)
        (ours,) = blocks.get_block_ids()
        self._sources += theirs[first : last + 1]
        self._targets += ours[first : last + 1]
        self._followers.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Copies blocks, whole ones: what is behind the prompt is written before it is read.

        Sources were computed in earlier steps, and targets are new: none is both.
        """
        if self._targets:
            sources, targets = torch.tensor(self._sources), torch.tensor(self._targets)
            layers = self._vllm_config.compilation_config.static_forward_context
            for name in self._layers:
                cache = layers[name].kv_cache  # [blocks, ...]
                cache.index_copy_(0, targets, cache.index_select(0, sources))
            self._sources, self._targets = [], []
            self._followers.clear()
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forgets a request; its blocks may be freed."""
        self._taken.pop(request.request_id, None)
        if self._shares and request.prompt_token_ids is not None:
            prompt = _prompt_of(request)
            siblings = self._requests[prompt]
            del siblings[request.request_id]
            if not siblings:
                del self._requests[prompt]
        return False, None

    # Worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""


def _prompt_of(request: Request) -> _Prompt:
    images = tuple((one.identifier, one.mm_position.offset) for one in request.mm_features)
    return (request.cache_salt, images, *request.prompt_token_ids)
