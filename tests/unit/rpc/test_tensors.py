"""Element types on the wire are those of torch."""

from __future__ import annotations

import pytest
import torch

from rolemesh.rpc.experience.tensors import ITEM_BYTES, NAMES, data_type_of
from rolemesh.v1 import tensor_pb2

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widths_and_names_are_those_of_torch(dtype: torch.dtype) -> None:
    assert ITEM_BYTES[data_type_of(str(dtype))] == dtype.itemsize
    assert getattr(torch, NAMES[data_type_of(str(dtype))]) is dtype


def test_every_data_type_but_unspecified_has_a_width() -> None:
    assert set(ITEM_BYTES) == set(tensor_pb2.DataType.values()) - {0}


def test_an_unknown_dtype_name_is_refused() -> None:
    with pytest.raises(ValueError, match="complex64"):
        data_type_of("torch.complex64")
