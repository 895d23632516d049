"""Losses that a caller gives as a graph: its operations by name, from a list, and no code.

Shape letters: M unmasked completion tokens of the micro-batch, T those of one row, K numbers a
token.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rolemesh.engine.algorithms.aggregation import LossScale
from rolemesh.engine.algorithms.losses.base import ModelOutputs, UnmaskedReader, loss_for
from rolemesh.engine.algorithms.losses.target_losses import TargetLoss
from rolemesh.engine.algorithms.ragged import loss_mask_of, unmasked_per_row
from rolemesh.engine.experience import Experience
from rolemesh.engine.granted.user_code import UserCodeError
from rolemesh.engine.hardware.devices import sent
from rolemesh.engine.specs.losses.traced_losses import (
    FUNCTIONAL,
    FUNCTIONS,
    MATHEMATICS,
    OPERATORS,
    GraphNode,
    TracedLossSpec,
    input_column,
)

MOST_NUMBERS = 2**22
"""Elements of a tensor of a graph: 16 MiB of float32."""

MOST_OF_PASS = 2**26
"""Elements of all tensors of a micro-batch, which stay until its gradient is there: 256 MiB."""

MOST_DIMS = 4

_OF_NUMBERS = frozenset(OPERATORS) - {"getitem", "eq", "ne"}
"""Operators of tensors and numbers alone: a text times a number would be a long text."""

_MOST_POWER = 64
"""Of a whole number, whose powers have no bound."""


@loss_for(TracedLossSpec)
class TracedLoss(TargetLoss[TracedLossSpec]):
    """The sum of its spec, of this micro-batch's rows.

    Metrics are sums over rows, by the names that the graph gives them; a caller who wants a mean
    divides by the rows.
    """

    origin = "; the loss is a graph of the caller"

    def __call__(
        self, outputs: ModelOutputs, batch: Experience, scale: LossScale
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Computes this micro-batch's share; see `Loss`."""
        read, spec = UnmaskedReader(batch), self.spec
        policy_M = self.policy(read, outputs)
        if spec.inputs[0].rank == 1:
            policy_M = policy_M.squeeze(1)
        counts = unmasked_per_row(*loss_mask_of(batch)).tolist()
        given = [policy_M, *(self._column(read, at, policy_M) for at in range(1, len(spec.inputs)))]
        loss, room = 0.0 * policy_M.sum(), _Room()
        metrics = {name: loss.detach() for name in spec.metrics}
        for row in zip(*(torch.split(one, counts) for one in given), strict=True):
            if not len(row[0]):
                continue
            found, told = self._of_row(row, room)
            loss = loss + found
            metrics = {name: metrics[name] + told[name].detach() for name in metrics}
        return loss, {"loss": loss, **metrics}

    def _column(self, read: UnmaskedReader, at: int, like: torch.Tensor) -> torch.Tensor:
        """An argument at each token; one of numbers is of the type of the log-probs."""
        wanted = self.spec.inputs[at]
        found = read.column_on_host(input_column(wanted.name))
        if found.dtype.is_floating_point:
            found = found.to(like.dtype)
        is_flat = wanted.rank == 2 and found.dim() == 1
        return sent(found[:, None] if is_flat else found, like.device)

    def _of_row(
        self, row: Sequence[torch.Tensor], room: _Room
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        arguments = [
            # A number stands at each token.
            one[0] if wanted.rank == 0 else one
            for one, wanted in zip(row, self.spec.inputs, strict=True)
        ]
        values: dict[str, Any] = {}
        remaining = iter(arguments)
        for node in self.spec.nodes[:-1]:
            if node.op == "placeholder":
                values[node.name] = next(remaining)
                continue
            try:
                values[node.name] = _called(node, values)
                room.take(values[node.name])
            except UserCodeError as error:
                raise UserCodeError(f"node {node.name!r} of the loss: {error}") from error
            except Exception as error:
                text = str(error).partition("\n")[0]
                raise UserCodeError(
                    f"node {node.name!r} of the loss, {node.target}: {text or type(error).__name__}"
                ) from error
        loss, metrics = _value(self.spec.nodes[-1].args[0], values)
        for name, one in {"the loss": loss, **metrics}.items():
            if not isinstance(one, torch.Tensor) or one.dim():
                what = list(one.shape) if isinstance(one, torch.Tensor) else type(one).__name__
                raise UserCodeError(f"{name} of a row is {what}: give one number, a tensor []")
        if row[0].requires_grad and not loss.requires_grad:
            raise UserCodeError("the loss does not depend on logprobs: there is no gradient")
        return loss, metrics


def _called(node: GraphNode, values: Mapping[str, Any]) -> Any:
    args = [_value(one, values) for one in node.args]
    kwargs = {name: _value(one, values) for name, one in node.kwargs.items()}
    _check_room(node, args, kwargs)
    if node.op == "call_method":
        owner, *rest = args
        if not isinstance(owner, torch.Tensor):
            raise UserCodeError(f"{node.target} is called of a {type(owner).__name__}")
        return getattr(owner, node.target)(*rest, **kwargs)
    return _FUNCTIONS[node.target](*args, **kwargs)


def _value(arg: Any, values: Mapping[str, Any]) -> Any:
    """An argument as Python has it; what it may be was checked with the spec."""
    if isinstance(arg, list):
        return [_value(one, values) for one in arg]
    if not isinstance(arg, dict):
        return arg
    ((kind, value),) = arg.items()
    match kind:
        case "ref":
            return values[value]
        case "tuple":
            return tuple(_value(one, values) for one in value)
        case "dict":
            return {name: _value(one, values) for name, one in value.items()}
        case "slice":
            return slice(*(_value(one, values) for one in value))
        case "ellipsis":
            return ...
        case "float":
            return float(value)
        case _:
            return getattr(torch, value)


def _check_room(node: GraphNode, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuses a call whose result would be too large, before it is made."""
    module, _, name = node.target.rpartition(".")
    if module == "operator" and name in _OF_NUMBERS:
        for one in args:
            if not isinstance(one, torch.Tensor | int | float):
                raise UserCodeError(f"{node.target} of a {type(one).__name__}: give numbers")
        if name == "pow" and isinstance(args[-1], int) and abs(args[-1]) > _MOST_POWER:
            raise UserCodeError(f"a power of {args[-1]}: {_MOST_POWER} is the largest")
    tensors = [one for one in _flat([*args, *kwargs.values()]) if isinstance(one, torch.Tensor)]
    most = _most_numbers(name, tensors)
    if most > MOST_NUMBERS:
        raise UserCodeError(
            f"{node.target} could give {most} numbers, and {MOST_NUMBERS} are the most"
        )


def _most_numbers(name: str, tensors: Sequence[torch.Tensor]) -> int:
    """Elements that a call of the list can give."""
    sizes = [one.numel() for one in tensors]
    if name == "outer":
        return math.prod(sizes)
    if name in ("cat", "stack"):
        return sum(sizes)
    if name == "getitem" and tensors:
        # Each index gives a slice of the tensor; a mask no more than it has.
        sliced, *indexes = tensors
        indexes = [one for one in indexes if one.dtype != torch.bool]
        if not indexes:
            return sliced.numel()
        return sliced.numel() // max(1, min(sliced.shape, default=1)) * _joined(indexes)
    if name == "matmul":
        # Each row of the one with each column of the other.
        return math.prod(
            one.numel() // max(1, one.shape[-1 if at == 0 else -min(2, one.dim())])
            for at, one in enumerate(tensors)
            if one.dim()
        )
    return _joined(tensors)


def _joined(tensors: Sequence[torch.Tensor]) -> int:
    """Elements by broadcasting, at most: each dimension is the longest of theirs."""
    dims = max((one.dim() for one in tensors), default=0)
    shapes = [(1,) * (dims - one.dim()) + tuple(one.shape) for one in tensors]
    return math.prod(max(at) for at in zip(*shapes, strict=True))


def _flat(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for one in values:
        found += _flat(one) if isinstance(one, list | tuple) else [one]
    return found


class _Room:
    """What the tensors of a micro-batch may still take."""

    def __init__(self) -> None:
        self._left = MOST_OF_PASS

    def take(self, value: Any) -> None:
        """Counts what a call gave; refuses what no later one may have."""
        for one in _flat([value]):
            if isinstance(one, torch.Tensor):
                if one.dim() > MOST_DIMS:
                    raise UserCodeError(
                        f"a tensor of shape {list(one.shape)}: {MOST_DIMS} sizes at most"
                    )
                self._left -= one.numel()
            elif isinstance(one, int) and abs(one) >= 2**63:
                raise UserCodeError("a whole number that is too large")
        if self._left < 0:
            raise UserCodeError(
                f"all tensors of a micro-batch have more than {MOST_OF_PASS} numbers: do fewer "
                "operations, or send shorter data"
            )


def _functions() -> dict[str, Callable[..., Any]]:
    """The functions that a graph may name."""
    functional = torch.nn.functional
    found: dict[str, Callable[..., Any]] = {
        **{f"operator.{name}": getattr(operator, name) for name in OPERATORS},
        **{f"math.{name}": getattr(math, name) for name in MATHEMATICS},
        **{f"torch.nn.functional.{name}": getattr(functional, name) for name in FUNCTIONAL},
        "torch.nn.functional.log_softmax": functional.log_softmax,
        "torch.nn.functional.softmax": functional.softmax,
        "torch._C._nn.log_sigmoid": functional.logsigmoid,
        "torch._C._nn.softplus": functional.softplus,
        "torch._C._nn.gelu": functional.gelu,
        "builtins.getattr": getattr,
    }
    for name in FUNCTIONS:
        if name not in found:
            found[name] = getattr(torch, name.removeprefix("torch."))
    return found


_FUNCTIONS: Mapping[str, Callable[..., Any]] = _functions()
