"""Messages of simulated services: which columns a call makes, and the response that holds them."""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pool, message_factory

from rolemesh.engine.specs.columns import (
    COLUMNS,
    DATA_COLUMNS,
    PAIR_COLUMNS,
    ROLLOUT_COLUMNS,
)
from rolemesh.v1 import data_pb2, experience_pb2, operation_pb2, tensor_pb2


@cache
def response_class(method: str) -> Any:
    """The message class of a method's response; `method` is "/package.Service/Method"."""
    name = method.removeprefix("/").replace("/", ".")
    found = descriptor_pool.Default().FindMethodByName(name)
    return message_factory.GetMessageClass(found.output_type)


@cache
def progress(method: str) -> Any:
    """The sign of life of a call that streams its progress."""
    return response_class(method)(progress=operation_pb2.Progress(stage="compute"))


@cache
def schema(name: str) -> experience_pb2.ColumnSchema:
    """Schema of a column. Its type matters to those who pull rows, and here none does."""
    if name not in COLUMNS:
        raise ValueError(
            f"column {name!r} stands in no table (engine/specs/columns.py): add it there"
        )
    return experience_pb2.ColumnSchema(
        name=name,
        kind=experience_pb2.COLUMN_KIND_COMPLETION,
        dtype=tensor_pb2.DATA_TYPE_FLOAT32,
    )


def columns_of(role: str, method: str, request: Any, estimator: tuple[str, ...]) -> tuple[str, ...]:
    """Columns that a call makes.

    Args:
        role: Who is called.
        method: Name of the RPC.
        request: Its message.
        estimator: What the recipe's estimator makes.
    """
    match method:
        case "Generate":
            return ROLLOUT_COLUMNS
        case "ReadBatch":
            is_pair = request.kind != data_pb2.READ_KIND_DEMONSTRATION
            return (*DATA_COLUMNS, *PAIR_COLUMNS) if is_pair else DATA_COLUMNS
        case "ComputeLogprobs":
            top = ("_top_ids", "_top") if request.top_k else ()
            return (request.column, *(f"{request.column}{name}" for name in top))
        case "ComputeValues":
            return ("values",)
        case "ComputeReward":
            return ("costs" if role == "cost" else "rewards",)
        case "ComputeAdvantages":
            return estimator
        case _:
            return ()


def reference(
    key: operation_pb2.OperationKey,
    columns: tuple[str, ...],
    num_rows: int,
    *,
    experience_id: str,
    address: str,
    role: str,
) -> experience_pb2.ExperienceRef:
    """Names columns that a service holds."""
    shard = experience_pb2.Shard(
        experience_id=experience_id, num_rows=num_rows, address=address, role=role
    )
    group = experience_pb2.ColumnGroup(columns=[schema(name) for name in columns], shards=[shard])
    return experience_pb2.ExperienceRef(
        run_id=key.run_id, step=key.step, num_rows=num_rows, groups=[group]
    )
