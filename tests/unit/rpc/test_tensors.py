"""A tensor whose bytes do not fit its shape is refused before they are touched."""

from __future__ import annotations

import pytest
import torch

from rolemesh.rpc.tensors import (
    ITEM_BYTES,
    TensorMalformedError,
    check_tensor,
    data_type_of,
)
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


def test_every_data_type_but_unspecified_has_a_width() -> None:
    assert set(ITEM_BYTES) == set(tensor_pb2.DataType.values()) - {0}


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 5), (1, 1, 4)], ids=str)
def test_fitting_bytes_are_returned(shape: tuple[int, ...]) -> None:
    data = torch.ones(shape).numpy().tobytes()
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=shape, data=data)
    assert check_tensor(tensor, "scores") == data


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"),
    [
        (tensor_pb2.DATA_TYPE_FLOAT32, (3,), 11),
        (tensor_pb2.DATA_TYPE_FLOAT32, (3,), 16),
        (tensor_pb2.DATA_TYPE_FLOAT32, (), 0),
        (tensor_pb2.DATA_TYPE_INT64, (2, -1), 0),
        (tensor_pb2.DATA_TYPE_UINT8, (2**62, 2**62), 1),
        (tensor_pb2.DATA_TYPE_UNSPECIFIED, (1,), 4),
        (tensor_pb2.DATA_TYPE_UINT8, (1,) * 17, 1),
    ],
    ids=str,
)
def test_bytes_that_do_not_fit_are_refused_by_field(
    dtype: tensor_pb2.DataType.ValueType, shape: tuple[int, ...], num_bytes: int
) -> None:
    tensor = tensor_pb2.Tensor(dtype=dtype, shape=shape, data=bytes(num_bytes))
    with pytest.raises(TensorMalformedError, match=r"^scores: (dtype|shape)"):
        check_tensor(tensor, "scores")


def test_an_unknown_dtype_name_is_refused() -> None:
    with pytest.raises(ValueError, match="complex64"):
        data_type_of("torch.complex64")
