"""Losses of a caller as a graph of known operations, which is data and never code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.specs.base import Spec
from rolemesh.engine.specs.losses.target_losses import TargetLossSpec

MOST_NODES = 1000
MOST_INPUTS = 16

_DEEPEST = 6
"""Of an argument, e.g. a tuple of slices."""
_LONGEST = 64
"""Entries of a list, and characters of a text, in an argument."""
_LARGEST = 2**31
"""A whole number in an argument is below it."""
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ELEMENTWISE = _names(
    "abs add ceil clamp clamp_max clamp_min clip cos div divide eq erf exp expm1 floor ge gt "
    "isfinite isinf isnan le lerp log log1p logaddexp logical_and logical_not logical_or lt "
    "maximum minimum mul multiply nan_to_num ne neg negative pow reciprocal relu round rsqrt "
    "sigmoid sign sin sqrt square sub subtract tanh true_divide where"
)
"""Of torch, each of which gives a tensor of the shape that its arguments have together."""

SHAPING = _names(
    "cumsum detach dot flatten flip gather logcumsumexp log_softmax logsumexp matmul max mean "
    "median min narrow norm outer permute reshape select softmax squeeze std sum transpose t "
    "unsqueeze var amax amin argmax argmin all any ones_like zeros_like full_like numel cat stack"
)
"""Of torch, too."""

OPERATORS = _names(
    "abs add and_ eq floordiv ge getitem gt inv invert le lt matmul mod mul ne neg or_ pos pow sub "
    "truediv"
)
MATHEMATICS = _names("ceil cos exp floor log log1p log2 sin sqrt tanh")
"""Of Python's math, for numbers."""
FUNCTIONAL = _names(
    "elu gelu huber_loss l1_loss leaky_relu logsigmoid mse_loss relu sigmoid silu smooth_l1_loss "
    "softplus tanh"
)
"""Of torch.nn.functional."""

FUNCTIONS = frozenset(
    {
        *(f"torch.{name}" for name in (*ELEMENTWISE, *SHAPING)),
        *(f"operator.{name}" for name in OPERATORS),
        *(f"math.{name}" for name in MATHEMATICS),
        *(f"torch.nn.functional.{name}" for name in FUNCTIONAL),
        # What torch.fx calls some of them.
        "torch.nn.functional.log_softmax",
        "torch.nn.functional.softmax",
        "torch._C._nn.log_sigmoid",
        "torch._C._nn.softplus",
        "torch._C._nn.gelu",
        "builtins.getattr",
    }
)
"""Functions that a graph may name."""

METHODS = frozenset(
    {
        *ELEMENTWISE,
        *SHAPING,
        *("bool", "contiguous", "dim", "double", "float", "int", "long", "size", "type_as", "view"),
    }
    - {"where_", "cat", "stack", "ones_like", "zeros_like", "full_like"}
)
"""Methods of tensors that a graph may name."""

ATTRIBUTES = frozenset({"ndim", "shape", "T"})
"""Attributes of tensors that a graph may read."""

DTYPES = frozenset({"bool", "float32", "float64", "int64"})

KEYWORDS = frozenset(
    _names(
        "alpha approximate axis beta condition correction delta descending dim dim0 dim1 dims "
        "dtype end exponent fill_value index input keepdim keepdims length max min nan neginf "
        "negative_slope ord other p posinf reduction rounding_mode start tensors threshold "
        "unbiased weight"
    )
)
"""Names of arguments that a call may have: none that chooses where a result lies, as `out` and
`device` do."""


class GraphInput(Spec):
    """An argument of the loss."""

    name: str = Field(pattern=r"^[a-z_][a-z0-9_]{0,63}$")
    """Of the argument: `logprobs` first, then columns of the batch."""
    rank: Literal[0, 1, 2]
    """0: a number for each row, [T]: one for each token, 2: [T, K]."""


class GraphNode(Spec):
    """One step of the graph, as torch.fx records it."""

    op: Literal["placeholder", "call_function", "call_method", "output"]
    """What it is: an argument, a call, or what is returned."""
    name: str = Field(min_length=1, max_length=128)
    """By which later nodes refer to it."""
    target: str = Field(max_length=128)
    """The argument's name, the function's or the method's."""
    args: tuple[Any, ...] = Field(default=(), max_length=_LONGEST)
    """Of the call. An object with one key stands for what JSON has not: `ref` for a node, `tuple`,
    `dict`, `slice`, `ellipsis`, `float` and `dtype`."""
    kwargs: dict[str, Any] = Field(default_factory=dict, max_length=_LONGEST)
    """Of the call, by name."""


class TracedLossSpec(TargetLossSpec):
    """The sum over rows of what a graph gives for each of them.

    The graph has the form of torch.fx: its nodes are calls of functions and methods that are listed
    here, in order, and no other operation. It gets the log-probs of a row's tokens and columns of
    the batch, and returns a number and metrics.
    """

    type: Literal["traced"] = "traced"
    inputs: Annotated[tuple[GraphInput, ...], Field(min_length=1, max_length=MOST_INPUTS)]
    """In the order of the graph's arguments; the first is `logprobs`."""
    nodes: Annotated[tuple[GraphNode, ...], Field(min_length=2, max_length=MOST_NODES)]
    """In the order in which they are computed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [one.name for one in self.inputs]
        if names[0] != "logprobs" or self.inputs[0].rank == 0 or len(set(names)) < len(names):
            raise ValueError(f"inputs are {names}: give logprobs of rank 1 or 2 first, each once")
        placeholders = [node.target for node in self.nodes if node.op == "placeholder"]
        if placeholders != names:
            raise ValueError(f"the graph takes {placeholders}, and inputs are {names}")
        known = set[str]()
        for node in self.nodes:
            _check_node(node, known)
            if node.name in known:
                raise ValueError(f"two nodes are called {node.name!r}")
            known.add(node.name)
        if [node.op for node in self.nodes].count("output") != 1 or self.nodes[-1].op != "output":
            raise ValueError("the graph must end with one output")
        _check_output(self.nodes[-1])
        return self

    @property
    def metrics(self) -> dict[str, str]:
        """Names of the metrics, each with the node that gives it."""
        _, told = self.nodes[-1].args[0]["tuple"]
        return {name: one["ref"] for name, one in told.get("dict", {}).items()}

    def columns(self) -> tuple[str, ...]:
        """One for each input but the first; given targets; and the mask."""
        inputs = (input_column(one.name) for one in self.inputs[1:])
        return (*inputs, *self.target_columns(), "loss_mask")


def input_column(name: str) -> str:
    """The column that an argument of a graph is read from."""
    return f"input_{name}"


def _check_node(node: GraphNode, known: set[str]) -> None:
    allowed = {"call_function": FUNCTIONS, "call_method": METHODS}.get(node.op)
    if allowed is not None and node.target not in allowed:
        raise ValueError(f"node {node.name!r} calls {node.target!r}, which no loss may here")
    reads = node.args[1] if len(node.args) == 2 else None
    if node.target == "builtins.getattr" and not (
        isinstance(reads, str) and reads in ATTRIBUTES and not node.kwargs
    ):
        raise ValueError(
            f"node {node.name!r} reads an attribute: these can be read: {sorted(ATTRIBUTES)}"
        )
    if node.op == "call_method" and (not node.args or "ref" not in _object(node.args[0])):
        raise ValueError(f"node {node.name!r} is a method of nothing")
    for name in node.kwargs:
        if name not in KEYWORDS:
            raise ValueError(
                f"node {node.name!r} has the argument {name[:_LONGEST]!r}: no call may"
            )
    for arg in (*node.args, *node.kwargs.values()):
        for name in _refs(arg, node.name):
            if name not in known:
                raise ValueError(f"node {node.name!r} refers to {name!r}, which is not before it")


def _refs(arg: Any, where: str, depth: int = 0) -> Iterator[str]:
    """Nodes that an argument refers to; refuses what no argument may be."""
    parts: list[Any] = []
    if isinstance(arg, list):
        parts, is_right = arg, len(arg) <= _LONGEST
    elif isinstance(arg, dict):
        is_right = len(arg) == 1 and all(_is_encoded(*one) for one in arg.items())
        match arg if is_right else None:
            case {"ref": str() as name}:
                yield name
            case {"tuple": list() as parts} | {"slice": list() as parts}:
                pass
            case {"dict": dict() as values}:
                parts = list(values.values())
    elif isinstance(arg, str):
        is_right = len(arg) <= _LONGEST
    else:
        # A bool is an int, and a float has no bound.
        is_right = (
            arg is None or isinstance(arg, float) or (isinstance(arg, int) and abs(arg) < _LARGEST)
        )
    if not is_right or depth > _DEEPEST:
        kind = type(arg).__name__
        raise ValueError(f"node {where!r} has an argument that no call takes, a {kind}")
    for one in parts:
        yield from _refs(one, where, depth + 1)


def _is_encoded(kind: str, value: Any) -> bool:
    """Whether an object with one key is one that stands for what JSON has not."""
    match kind:
        case "ref":
            return isinstance(value, str)
        case "tuple":
            return isinstance(value, list) and len(value) <= _LONGEST
        case "slice":
            return isinstance(value, list) and len(value) == 3
        case "dict":
            return isinstance(value, dict) and len(value) <= _LONGEST
        case "ellipsis":
            return value is True
        case "float":
            return value in ("inf", "-inf", "nan")
        case "dtype":
            return isinstance(value, str) and value in DTYPES
        case _:
            return False


def _check_output(node: GraphNode) -> None:
    wrong = ValueError("the output must be (loss, metrics): a node, and nodes by name")
    pair = _object(node.args[0] if len(node.args) == 1 else None).get("tuple")
    if not isinstance(pair, list) or len(pair) != 2 or "ref" not in _object(pair[0]):
        raise wrong
    told = _object(pair[1]).get("dict")
    if not isinstance(told, dict) or not all("ref" in _object(one) for one in told.values()):
        raise wrong
    for name in told:
        if not _METRIC.fullmatch(name):
            raise ValueError(f"the metric {name!r} must be custom/NAME:sum or custom/NAME:mean")


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
