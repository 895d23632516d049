"""Routes that vLLM itself gives out with its tokens, on a GPU. Imports no vLLM.

VLLM 0.32 does so in its second model runner, which wants Triton (`enable_return_routed_experts`):
every step gives the routes of the tokens that it computed, of all layers, and a request that has
ended has them in its output. One that is ended from here has them where vLLM collects them.
Not verified on a GPU.

Shape letters: T tokens that went through the model, L layers, K experts of a token, W = K times the
layers with experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rolemesh.engine.specs.columns import NO_ROUTE

ENGINE_ARGUMENTS: Mapping[str, Any] = {"enable_return_routed_experts": True}
"""What vLLM's EngineArgs need."""


class ReturnedRoutes:
    """Routes of an engine's requests, as `routes.EngineRoutes` gives them.

    What is computed anew by new weights in the middle of a completion keeps the routes of its first
    time: vLLM gives the rows of each token out once. Owned by the compute thread.
    """

    def __init__(self, engine: Any, layers: Sequence[int], experts_of_token: int) -> None:
        """Keeps the engine.

        Args:
            engine: VLLM's LLMEngine, with ENGINE_ARGUMENTS.
            layers: Those with experts, in order.
            experts_of_token: K.
        """
        self._engine = engine
        self._layers = list(layers)
        self._chosen = experts_of_token

    def taken(self, output: Any, engine_id: str, num_tokens: int) -> np.ndarray:
        """Gives out the routes of a request that has ended, or is about to be ended.

        Args:
            output: VLLM's RequestOutput.
            engine_id: By which the engine's own parts know the request.
            num_tokens: Of prompt and completion.

        Returns:
            uint8 [num_tokens, W]; the last token that was drawn has none.

        Raises:
            RuntimeError: VLLM gave routes of other tokens, layers or experts.
        """
        rows_TLK: np.ndarray | None = output.outputs[0].routed_experts
        if rows_TLK is None:
            chunks = self._engine.output_processor.request_states[engine_id].routed_experts_chunks
            rows_TLK = np.concatenate(chunks) if chunks else None
        expected = (num_tokens - 1, max(self._layers) + 1, self._chosen)
        found = None if rows_TLK is None else rows_TLK.shape
        if rows_TLK is None or found is None or not _fits(found, expected):
            raise RuntimeError(
                f"vLLM gave routes of the shape {found}, but {num_tokens} tokens need "
                f"{expected}: leave rollout.replay_routes out, and report this with vLLM's version"
            )
        routes = np.full((num_tokens, len(self._layers) * self._chosen), NO_ROUTE, dtype=np.uint8)
        routes[:-1] = rows_TLK[:, self._layers].reshape(num_tokens - 1, -1)
        return routes

    def forget(self) -> None:
        """Keeps nothing itself."""

    def forget_cached(self) -> None:
        """Keeps nothing itself: vLLM empties its own store with the prefix cache."""


def _fits(found: tuple[int, ...], expected: tuple[int, int, int]) -> bool:
    """Whether rows are of so many tokens; layers after the last with experts do not matter."""
    tokens, layers, chosen = expected
    return len(found) == 3 and found[0] == tokens and found[1] >= layers and found[2] == chosen
