"""The products of a vLLM engine's one LoRA slot on a CPU.

Imports vLLM, so it is itself imported late. VLLM 0.32 serves there as many adapters in a step as it
has slots, and gathers a copy of the factors for each token. Here there is one slot, and nearly
always all tokens of a step have it: then plain products do.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform


def serve_one_slot() -> None:
    """Has engines that this process makes on a CPU multiply plainly where they can."""
    name = f"{OneSlot.__module__}.{OneSlot.__qualname__}"
    type(current_platform).get_punica_wrapper = classmethod(lambda _: name)


class OneSlot(PunicaWrapperCPU):  # type: ignore[misc]
    """VLLM's products, and plain ones for steps whose tokens all have the adapter of slot 0.

    Shape letters: I inputs, N tokens, O outputs, R rank, S slots.
    """

    _all_have_it = False

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Hears which tokens of the next step have an adapter."""
        super().update_metadata(*args, **kwargs)
        self._all_have_it = not bool(self.token_lora_indices.any())

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """Adds scale * x A^T B^T to the slices of y, side by side, in place.

        Args:
            y: [..., O of all slices].
            x: [..., I].
            lora_a_stacked: [S, 1, R, I] of each slice.
            lora_b_stacked: [S, 1, O, R] of each slice.
            scale: What the product is multiplied by.
            output_slices: O of each.
            kwargs: For vLLM's own.
        """
        if not self._all_have_it:
            super().add_lora_linear(
                y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **kwargs
            )
            return
        # As vLLM does it: A's products in float32, B's in the type of the layer.
        y_NO, x_NI = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1]).float()
        start = 0
        for a_S1RI, b_S1OR, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            narrow_NR = (x_NI @ a_S1RI[0, 0].float().t()).to(y.dtype)
            y_NO[:, start : start + size].addmm_(narrow_NR, b_S1OR[0, 0].t(), alpha=scale)
            start += size
