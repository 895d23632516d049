"""Times products of the quickstart's model: python -m rolemesh.services.preview.products.

Prints one JSON object: operations a second of a core in forward products, which are of float32, and
in backward ones, which are of the type that this CPU is fast in. Takes a second or two.
"""

from __future__ import annotations

import json
import time

import torch

from rolemesh.engine.hardware.devices import device_of

_ROWS = 512
"""Tokens of a pass, about those of an optimizer step of the quickstart."""

_LAYER = (
    *((576, 576), (576, 192), (576, 192), (576, 576)),
    *((576, 1536), (576, 1536), (1536, 576)),
)
"""Columns and rows of the weights in a layer of SmolLM2-135M. The head is as fast."""

_TRY_S = 0.5
"""Seconds for the repetitions of one kind of product, of which there are three at least."""


def main() -> int:
    """Measures, and prints."""
    cores = torch.get_num_threads()
    # The time of one thread is the machine's, whatever other programs take of it meanwhile.
    torch.set_num_threads(1)
    is_fast = device_of("cpu").multiplies_bfloat16
    told = {
        "forward": _rate(torch.float32, is_backward=False),
        "backward": _rate(torch.bfloat16 if is_fast else torch.float32, is_backward=True),
        "cores": cores,
    }
    print(json.dumps(told), flush=True)
    return 0


def _rate(dtype: torch.dtype, *, is_backward: bool) -> float:
    """Operations a second over the products of a layer."""
    factors = []
    for columns, outputs in _LAYER:
        x = torch.randn(_ROWS, columns, dtype=dtype)
        weight = torch.randn(outputs, columns, dtype=dtype)
        if is_backward:
            gradient = torch.randn(_ROWS, outputs, dtype=dtype)
            factors += [(gradient, weight), (gradient.t(), x)]
        else:
            factors.append((x, weight.t()))
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < 3 or time.perf_counter() - began < _TRY_S:
        started = time.thread_time()
        for left, right in factors:
            torch.mm(left, right)
        taken.append(time.thread_time() - started)
    flops = sum(2 * _ROWS * columns * outputs for columns, outputs in _LAYER)
    return (2 if is_backward else 1) * flops / min(taken)


if __name__ == "__main__":
    raise SystemExit(main())
