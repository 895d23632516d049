"""The experts that a vLLM engine's tokens go through, heard of its routers on a CPU.

Imports vLLM, so it is itself imported late. VLLM 0.32 gives routes out by its second model runner
alone, which does not run on a CPU (`returned_routes.py`); its routers hand their choices to
whoever asks. On a GPU graphs would leave such a call out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.layer import MoERunner

from rolemesh.engine.rollout.routes import KeptRoutes, flat_routes


class ListenedRoutes:
    """Routes of an engine's requests, by the ids that its parts know them by.

    What is computed anew, e.g. by new weights in the middle of a completion, is written over.
    Tokens whose keys come of the prefix cache go through no expert: their routes are those of the
    request that computed them. Owned by the compute thread.
    """

    def __init__(self, engine: Any, width: int) -> None:
        """Listens to the routers of an engine's model.

        Args:
            engine: VLLM's LLMEngine, of this process.
            width: Numbers of a token's route: layers with experts times experts of a token.
        """
        self._width = width
        self._taken: dict[int, torch.Tensor] = {}
        self._kept: dict[str, KeptRoutes] = {}
        self._cached: dict[bytes, KeptRoutes] = {}
        """Who has computed a beginning of whole blocks, by its tokens."""
        self._block_size: int = engine.vllm_config.cache_config.block_size
        worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
        self._runner = worker.model_runner
        self._listen(self._runner.model)
        self._execute: Callable[..., Any] = self._runner.execute_model
        self._runner.execute_model = self._executed

    def taken(self, output: Any, engine_id: str, num_tokens: int) -> np.ndarray:
        """Gives out the routes of a request that has ended, uint8 [tokens, W]."""
        return self._kept.pop(engine_id).of(num_tokens)

    def forget(self) -> None:
        """Drops those of requests that were given up."""
        self._kept.clear()

    def forget_cached(self) -> None:
        """Knows that the prefix cache is empty."""
        self._cached.clear()

    def _listen(self, model: nn.Module) -> None:
        runners = [module for module in model.modules() if isinstance(module, MoERunner)]
        runners.sort(key=lambda runner: runner.layer_id)
        for place, runner in enumerate(runners):
            runner.router.set_capture_fn(self._listener(place))

    def _listener(self, place: int) -> Callable[[torch.Tensor], None]:
        def take(chosen_SK: torch.Tensor) -> None:
            self._taken[place] = chosen_SK.clone()

        return take

    def _executed(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self._taken.clear()
        output = self._execute(scheduled, *args, **kwargs)
        if not self._taken:
            return output
        routes, first = flat_routes(self._taken), 0
        batch, size = self._runner.input_batch, self._block_size
        borrowers: list[tuple[KeptRoutes, np.ndarray]] = []
        for engine_id in batch.req_ids:
            number = scheduled.num_scheduled_tokens.get(engine_id, 0)
            index = batch.req_id_to_index[engine_id]
            # vLLM counts what is computed when the step's tokens are drawn.
            start = int(batch.num_computed_tokens_cpu[index])
            is_new = engine_id not in self._kept
            kept = self._kept.setdefault(engine_id, KeptRoutes(self._width))
            kept.put(np.arange(start, start + number), routes[first : first + number])
            first += number
            tokens = batch.token_ids_cpu[index]
            if is_new and start:
                borrowers.append((kept, tokens[:start]))
            # Of a beginning that two compute at once, either will do.
            for end in range((start // size + 1) * size, start + number + 1, size):
                self._cached.setdefault(tokens[:end].tobytes(), kept)
        # After all of the step, since its requests may share what is computed in it.
        for kept, beginning in borrowers:
            kept.borrow(len(beginning), self._cached[beginning.tobytes()])
        return output
