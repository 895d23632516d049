"""Losses that come as graphs: what a function gives row by row, and what no graph may do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from support.loss_graphs import loss_of
from support.ragged_batches import mixed_masks, random_batch

from rolemesh.engine.algorithms.losses import traced_losses
from rolemesh.engine.algorithms.losses.base import LossScale, ModelOutputs, make_loss
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.granted.user_code import UserCodeError
from rolemesh.engine.specs import TracedLossSpec
from rolemesh.engine.specs.columns import TARGET_IDS
from rolemesh.engine.specs.losses.traced_losses import FUNCTIONS, METHODS, input_column

WIDTH = 3


def clipped(logprobs: Any, old: Any, advantages: Any) -> Any:
    ratio = torch.exp(logprobs - old)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    far = (ratio - 1).abs() > 0.2
    return loss, {"custom/far:mean": far.float().mean(), "custom/ratio:sum": ratio.sum()}


def sliced(logprobs: Any, old: Any) -> Any:
    last = logprobs[-1:]
    gap = (logprobs - old)[..., :1].sum() + last.sum() / math.sqrt(2.0)
    centred = logprobs - logprobs.mean(dim=0, keepdim=True)
    return gap**2 + centred.pow(2).sum() / logprobs.shape[0], {"custom/gap:sum": gap}


def preferring(logprobs: Any, sign: Any) -> Any:
    score = F.logsigmoid(0.1 * sign * logprobs.sum())
    return -score + F.softplus(logprobs).mean(), {"custom/score:mean": score}


def spread(logprobs: Any, weights: Any) -> Any:
    norm = torch.logsumexp(logprobs, dim=-1)
    picked = torch.where(weights > 0.5, logprobs, torch.zeros_like(logprobs))
    return -(torch.softmax(weights, dim=-1) * picked).sum() + norm.square().mean(), {}


def masked(logprobs: Any, ids: Any) -> Any:
    return (logprobs * (ids % 2 == 0).float()).sum() + logprobs[0] * ids.max(), {}


LOSSES: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "clipped": (clipped, {"logprobs": 1, "old": 1, "advantages": 1}),
    "sliced": (sliced, {"logprobs": 1, "old": 1}),
    "preferring": (preferring, {"logprobs": 1, "sign": 0}),
    "spread": (spread, {"logprobs": 2, "weights": 2}),
    "masked": (masked, {"logprobs": 1, "ids": 1}),
}


def batch_of() -> Experience:
    whole = random_batch(mixed_masks(seed=6), {"old": (-2.0, -0.1)}, seed=7)
    batch = whole.experience(torch.float64)
    offsets, number = batch["loss_mask"].offsets, len(batch["loss_mask"].values)
    generator = torch.Generator().manual_seed(8)

    def column(values: torch.Tensor) -> Column:
        return Column(ColumnKind.COMPLETION, values, offsets)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    return batch | Experience(
        {
            input_column("old"): column(batch["old"].values),
            input_column("advantages"): column(2 * drawn(number) - 1),
            input_column("sign"): column(torch.full((number,), -1.0, dtype=torch.float64)),
            input_column("weights"): column(drawn(number, WIDTH)),
            input_column("ids"): column(torch.arange(number) % 7),
            TARGET_IDS: column(torch.zeros((number, WIDTH), dtype=torch.int32)),
        }
    )


def made(
    name: str, batch: Experience, leaf: torch.Tensor, **fields: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    function, ranks = LOSSES[name]
    fields = {"targets": WIDTH if ranks["logprobs"] == 2 else 0, **fields}
    spec = TracedLossSpec.model_validate(loss_of(function, ranks, **fields))
    loss = make_loss(spec)
    found = ModelOutputs(logprobs_N=leaf[:, 0], choices_NK=leaf)
    return loss(found, batch.require(loss.columns), LossScale.of(batch))


@pytest.mark.parametrize("name", LOSSES)
def test_a_graph_gives_what_its_function_gives_for_each_row(name: str) -> None:
    function, ranks = LOSSES[name]
    batch = batch_of()
    number = len(batch["loss_mask"].values)
    generator = torch.Generator().manual_seed(9)
    drawn = -torch.rand((number, WIDTH), generator=generator, dtype=torch.float64)
    leaf, oracle = (drawn.clone().requires_grad_() for _ in range(2))
    loss, metrics = made(name, batch, leaf)
    loss.backward()

    expected, told = torch.zeros((), dtype=torch.float64), dict[str, float]()
    offsets, mask = batch["loss_mask"].offsets, batch["loss_mask"].values
    assert offsets is not None
    for first, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        places = torch.arange(first, end)[mask[first:end]]
        if not len(places):
            continue
        policy = oracle[places] if ranks["logprobs"] == 2 else oracle[places, 0]
        given = [batch[input_column(one)].values[places] for one in list(ranks)[1:]]
        given = [
            one[0] if rank == 0 else one
            for one, rank in zip(given, list(ranks.values())[1:], strict=True)
        ]
        share, found = function(policy, *given)
        expected = expected + share
        for key, value in found.items():
            told[key] = told.get(key, 0.0) + float(value.detach())
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(leaf.grad, oracle.grad)
    assert {key: float(value) for key, value in metrics.items() if key != "loss"} == pytest.approx(
        told
    )


def test_rows_without_tokens_give_nothing_and_a_gradient_of_zeros() -> None:
    batch = batch_of()
    mask = batch["loss_mask"]
    nothing = Column(ColumnKind.COMPLETION, torch.zeros_like(mask.values), mask.offsets)
    batch = batch | Experience({"loss_mask": nothing})
    leaf = torch.zeros((len(mask.values), WIDTH), dtype=torch.float64, requires_grad=True)
    loss, metrics = made("clipped", batch, leaf)
    loss.backward()
    assert loss == 0
    assert {float(one.detach()) for one in metrics.values()} == {0.0}
    assert leaf.grad is not None
    assert not leaf.grad.any()


def test_no_rows_are_no_loss() -> None:
    batch = batch_of().select(torch.zeros(0, dtype=torch.int64))
    leaf = torch.zeros((0, WIDTH), dtype=torch.float64, requires_grad=True)
    for name in LOSSES:
        assert made(name, batch, leaf)[0] == 0


def test_every_operation_of_the_list_is_there() -> None:
    # Made with the module; one that torch has not would have failed there.
    assert traced_losses._FUNCTIONS.keys() == FUNCTIONS
    for name in METHODS:
        assert callable(getattr(torch.Tensor, name)), name


# --- what no graph may do ----------------------------------------------------------------------

PLACEHOLDER = {"op": "placeholder", "name": "p", "target": "logprobs"}
OUTPUT = {
    "op": "output",
    "name": "output",
    "target": "output",
    "args": [{"tuple": [{"ref": "x"}, {"dict": {}}]}],
}


def spec_of(*nodes: dict[str, Any], output: dict[str, Any] = OUTPUT) -> TracedLossSpec:
    return TracedLossSpec.model_validate(
        {"inputs": [{"name": "logprobs", "rank": 1}], "nodes": [PLACEHOLDER, *nodes, output]}
    )


def call(target: str, *args: Any, name: str = "x", op: str = "call_function") -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args)}


P, X = {"ref": "p"}, {"ref": "x"}
SUM = call("torch.sum", P)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (call("torch.load", "file"), "calls 'torch.load', which no loss may"),
        (call("builtins.eval", "1"), "calls 'builtins.eval'"),
        (call("os.system", "ls"), "calls 'os.system'"),
        (call("torch.zeros", 10), "calls 'torch.zeros'"),
        (call("builtins.getattr", P, "__class__"), "these can be read"),
        (call("builtins.getattr", P, "grad_fn"), "these can be read"),
        (call("tolist", P, op="call_method"), "calls 'tolist'"),
        (call("backward", P, op="call_method"), "calls 'backward'"),
        (call("__reduce__", P, op="call_method"), "calls '__reduce__'"),
        (call("sum", 3, op="call_method"), "is a method of nothing"),
        (call("torch.sum", {"ref": "later"}), "refers to 'later'"),
        (call("torch.sum", {"device": "cuda"}), "an argument that no call takes"),
        (call("torch.sum", {"dtype": "quint8"}), "an argument that no call takes"),
        (call("torch.sum", 2**40), "an argument that no call takes"),
        (call("torch.sum", "x" * 100), "an argument that no call takes"),
        (call("torch.sum", [[[[[[[[P]]]]]]]]), "an argument that no call takes"),
        (call("torch.sum", P, name="p"), "two nodes are called 'p'"),
        (call("builtins.getattr", P, {"ref": "p"}), "these can be read"),
        (call("torch.sum", {"dtype": ["float32"]}), "an argument that no call takes"),
        ({**call("torch.exp", P), "kwargs": {"out": P}}, "has the argument 'out': no call may"),
        ({**call("torch.zeros_like", P), "kwargs": {"device": "cuda"}}, "'device': no call may"),
        ({"op": "get_attr", "name": "x", "target": "weight"}, "call_function"),
        ({"op": "call_module", "name": "x", "target": "m"}, "call_function"),
    ],
)
def test_a_graph_with_any_other_operation_is_refused(node: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec_of(node)


def test_a_graph_has_inputs_an_end_and_a_bound() -> None:
    spec_of(SUM)
    for wrong, message in (
        ({**OUTPUT, "args": [X]}, r"the output must be \(loss, metrics\)"),
        ({**OUTPUT, "args": [{"tuple": [1.0, {"dict": {}}]}]}, "the output must be"),
        (
            {**OUTPUT, "args": [{"tuple": [X, {"dict": {"loss": X}}]}]},
            "must be custom/NAME:sum or custom/NAME:mean",
        ),
        (SUM, "must end with one output|two nodes"),
    ):
        with pytest.raises(ValidationError, match=message):
            spec_of(SUM, output=wrong)
    with pytest.raises(ValidationError, match="at most 1000 items"):
        spec_of(*(call("torch.sum", P, name=f"n{at}") for at in range(1000)))
    with pytest.raises(ValidationError, match="give logprobs of rank 1 or 2 first"):
        TracedLossSpec.model_validate(
            {"inputs": [{"name": "other", "rank": 1}], "nodes": [PLACEHOLDER, OUTPUT]}
        )


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([call("torch.outer", P, P)], "could give .* numbers, and .* are the most"),
        (
            [
                call("unsqueeze", P, 1, name="c", op="call_method"),
                call("operator.mul", {"ref": "c"}, P),
            ],
            "could give .* numbers",
        ),
        (
            [
                call("long", P, name="i", op="call_method"),
                call("torch.stack", [P, P], name="two"),
                call("operator.getitem", {"ref": "two"}, {"ref": "i"}),
            ],
            "operator.getitem could give 16777216 numbers",
        ),
        ([call("operator.mul", "text", 2**30)], "operator.mul of a str: give numbers"),
        ([call("operator.mul", {"tuple": [P]}, 2**30)], "operator.mul of a tuple"),
        ([call("operator.pow", 3, 2**30)], "a power of 1073741824: 64 is the largest"),
        ([call("torch.matmul", P, 3)], "node 'x' of the loss, torch.matmul: "),
        ([call("torch.exp", P)], r"the loss of a row is \[4096\]: give one number"),
        ([call("torch.sum", {"ref": "d"})], "does not depend on logprobs"),
        (
            [
                call("operator.add", P if at == 0 else {"ref": f"n{at - 1}"}, 1.0, name=f"n{at}")
                for at in range(20_000 // 32)
            ],
            "all tensors of a micro-batch have more than",
        ),
    ],
)
def test_a_call_that_fails_or_is_too_large_names_its_node(
    nodes: list[dict[str, Any]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that a test need not fill the memory.
    monkeypatch.setattr(traced_losses, "MOST_OF_PASS", 2**21)
    detached = call("detach", P, name="d", op="call_method")
    nodes = [detached, *nodes]
    if nodes[-1]["name"] != "x":
        nodes.append(call("torch.sum", {"ref": nodes[-1]["name"]}))
    loss = make_loss(spec_of(*nodes))
    number = 4096
    offsets = torch.tensor([0, number])
    mask = Column(ColumnKind.COMPLETION, torch.ones(number, dtype=torch.bool), offsets)
    leaf = torch.zeros(number, requires_grad=True)
    batch = Experience({"loss_mask": mask})
    with pytest.raises(UserCodeError, match=message):
        loss(ModelOutputs(logprobs_N=leaf), batch, LossScale.of(batch))
