"""What a torch device can do, for the settings that depend on it."""

from __future__ import annotations

from functools import cache
from typing import cast

import torch

from rolemesh.engine.specs.by_device import Device, DeviceType

_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")
"""Instructions for products of bfloat16, as torch calls them on x86 and on ARM."""


@cache
def device_of(device_type: str) -> Device:
    """The device of this process of that torch type.

    Measured without such instructions (AVX-512, torch 2.13, 1152 x 576 x 1536): a bfloat16 product
    takes 3 to 5 times as long as a float32 one.
    """
    if device_type != "cpu":
        return Device(cast(DeviceType, device_type))
    has = torch.cpu.get_capabilities()
    return Device("cpu", multiplies_bfloat16=any(has.get(name, False) for name in _BFLOAT16))
