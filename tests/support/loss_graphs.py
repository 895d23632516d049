"""Losses in Python as the graphs that clients send, by torch.fx."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx
from torch.fx.node import _get_qualified_name

NAMED = {torch.float32: "float32", torch.float64: "float64", torch.int64: "int64"}


def graph_of(loss: Callable[..., Any]) -> list[dict[str, Any]]:
    """The nodes of a traced function."""
    nodes = []
    for node in torch.fx.symbolic_trace(loss).graph.nodes:
        target = node.target
        if node.op == "call_function":
            # What Python calls builtins.getattr torch.fx calls getattr.
            name = _get_qualified_name(target)
            target = {"getattr": "builtins.getattr"}.get(name, name)
            target = target.replace("_operator.", "operator.")
        nodes.append(
            {
                "op": node.op,
                "name": node.name,
                "target": str(target),
                "args": [encoded(one) for one in node.args],
                "kwargs": {name: encoded(one) for name, one in node.kwargs.items()},
            }
        )
    return nodes


def encoded(arg: Any) -> Any:
    """An argument as JSON has it."""
    match arg:
        case torch.fx.Node():
            return {"ref": arg.name}
        case tuple():
            return {"tuple": [encoded(one) for one in arg]}
        case list():
            return [encoded(one) for one in arg]
        case dict():
            return {"dict": {name: encoded(one) for name, one in arg.items()}}
        case slice():
            return {"slice": [encoded(one) for one in (arg.start, arg.stop, arg.step)]}
        case torch.dtype():
            return {"dtype": NAMED[arg]}
        case _ if arg is ...:
            return {"ellipsis": True}
        case _:
            return arg


def loss_of(loss: Callable[..., Any], ranks: Mapping[str, int], **fields: Any) -> dict[str, Any]:
    """The loss `traced` of a function with the ranks of its arguments."""
    inputs = [{"name": name, "rank": rank} for name, rank in ranks.items()]
    return {"type": "traced", "inputs": inputs, "nodes": graph_of(loss), **fields}
