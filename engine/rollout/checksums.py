"""Checksums of weights, the same for every holder, so that holders can be compared."""

from __future__ import annotations

import hashlib

import torch

# Bytes are hashed in pieces: a device tensor is never copied whole to the host.
_PIECE_ELEMENTS = 1 << 24


def tensor_checksum(tensor: torch.Tensor) -> str:
    """SHA-256 (hex) of dtype, shape and values in row-major order.

    Equal values give equal checksums on every device and for every memory layout. -0.0 counts
    as 0.0: a weight read back from a packed matrix has lost that sign.

    Args:
        tensor: Floating [any shape].
    """
    digest = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
    flat = tensor.detach().contiguous().view(-1)
    for start in range(0, flat.numel(), _PIECE_ELEMENTS):
        piece = (flat[start : start + _PIECE_ELEMENTS] + 0.0).cpu()
        digest.update(piece.view(torch.uint8).numpy().data)
    return digest.hexdigest()
