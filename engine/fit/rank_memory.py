"""What one rank of a role holds: the real model makes a pass or an update while it is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from rolemesh.engine.algorithms.losses.base import make_loss
from rolemesh.engine.experience import Column, Experience
from rolemesh.engine.fit.alone import alone
from rolemesh.engine.fit.routing import evenly_spread
from rolemesh.engine.fit.tally import Purpose, Tally
from rolemesh.engine.fit.valueless import Valueless
from rolemesh.engine.hardware.devices import assuming
from rolemesh.engine.layout.ranks import HybridLayout
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.folder import without_values
from rolemesh.engine.models.images.image_tower import tower_bytes
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring_model import VALUE_HEAD, ScoreHead, ScoringModel
from rolemesh.engine.parallel.data_parallel import local_part
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import AnyOptimizerSpec, LossSpec, ModelSpec, Numerics
from rolemesh.engine.specs.columns import COLUMNS, INPUT_COLUMNS
from rolemesh.engine.train.optimizers.optimizer import OFFLOAD_BYTES
from rolemesh.engine.train.plan import UpdatePlan
from rolemesh.engine.train.trainer import Trainer

ModelKind = Literal["policy", "critic", "reward"]

_UNSHARDING = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
"""Methods of torch's FSDP2 that make whole weights and buffers of gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWork:
    """What a rank does, as far as its memory follows from it."""

    kind: ModelKind
    """Whose model: a policy's or reference's, a critic's, or a reward's."""
    model: ModelSpec
    layout: HybridLayout
    rank: int = 0
    optimizer: AnyOptimizerSpec | None = None
    """None: the model is frozen and only scores."""
    loss: LossSpec | None = None
    """What it is trained on; given with optimizer."""
    average: float | None = None
    """Of the moving average of what is trained; None: none is kept."""
    numerics: Numerics = "exact"
    row_tokens: int
    """Tokens in each row, prompt and completion."""
    prompt_tokens: int
    """Tokens of its prompt."""
    passes: int = 2
    """Micro-batches: with the second, gradients of the first are there already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """What a rank holds on its device, in bytes."""

    at_rest: Mapping[Purpose, int]
    """Between calls: weights and moments."""
    at_peak: Mapping[Purpose, int]
    """At the moment at which it held most."""
    peak_phase: Literal["passes", "step"]
    """Whether that was in forward and backward passes, or in the optimizer's step."""

    def with_weights(self, num_bytes: int) -> RankMemory:
        """The same beside further weights, which nothing changes."""
        at_rest, at_peak = (
            {**held, "weights": held["weights"] + num_bytes}
            for held in (self.at_rest, self.at_peak)
        )
        return replace(self, at_rest=at_rest, at_peak=at_peak)

    @property
    def peak(self) -> int:
        """Most bytes."""
        return sum(self.at_peak.values())

    @property
    def rest(self) -> int:
        """Bytes between calls."""
        return sum(self.at_rest.values())


def estimated(
    work: RankWork,
    device_kind: Literal["cpu", "cuda"] = "cuda",
    device_bytes: int | None = None,
) -> RankMemory:
    """What a rank of a service would hold, found without its weights or its device.

    The model, its cut, the trainer and the optimizer are those of a service; tensors have no
    values, and collective operations do nothing. Experts of a mixture are chosen equally often. The
    process must not have a world of torch's.

    Args:
        work: What it does. Of the model's folder, config.json is read alone.
        device_kind: What it computes on.
        device_bytes: Memory of the GPU, by which a service decides whether layers are recomputed
            where the model does not say so; None: not known.

    Raises:
        ModelFolderError, LayoutError, UnsupportedFamilyError: The model cannot be made so.
    """
    valueless = Valueless()
    tally = Tally(Valueless.is_valueless)
    with (
        alone(work.layout, work.rank) as mesh,
        assuming(device_kind, device_bytes),
        evenly_spread(),
        valueless,
        tally,
    ):
        with without_values(valueless.empty), _made_of_nothing(valueless):
            subject = _Subject(work, mesh, tally)
        with _gathers_seen(tally, valueless):
            found = subject.measured(device_kind)
        # The tower of images stands beside the stage with the embedding, frozen.
        tower = tower_bytes(work.model.path, device_kind) if mesh.pp.is_first else 0
        return found.with_weights(tower)


def counted(work: RankWork, mesh: RankMesh, tally: Tally) -> RankMemory:
    """What a rank of a service holds on a CPU, counted while it does its work.

    Args:
        work: What it does.
        mesh: The rank's place, in a world that is there.
        tally: Is entered already.
    """
    with _gathers_seen(tally, None):
        return _Subject(work, mesh, tally).measured("cpu")


class _Subject:
    """A role's model on one rank, at work."""

    def __init__(self, work: RankWork, mesh: RankMesh, tally: Tally) -> None:
        self._work, self._tally = work, tally
        self._trainer: Trainer | None = None
        with tally.purpose("weights"):
            if work.optimizer is None:
                self._rank_model = RankModel(_model(work, mesh, trainable=False))
            else:
                model = _model(work, mesh, trainable=True)
                self._trainer = Trainer(model, work.optimizer, average=work.average)
                self._rank_model = self._trainer.rank_model
        self._watch()

    def _watch(self) -> None:
        """Tells the tally what is being computed."""
        tally, model = self._tally, self._rank_model.model
        stage_forward, finish = model.stage_forward, model.finish
        patched: Any = model

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            tally.turn_to("activations")
            hidden_1SD: torch.Tensor = stage_forward(*args, **kwargs)
            return hidden_1SD

        def end(hidden_1SD: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            tally.turn_to("head")
            if torch.is_grad_enabled():
                hidden_1SD = _Behind.apply(hidden_1SD, tally)  # type: ignore[no-untyped-call]
            return finish(hidden_1SD, *args, **kwargs)

        patched.stage_forward, patched.finish = forward, end
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda weight: tally.mark([local_part(_gradient(weight))], "gradients")
                )

    def measured(self, device_kind: str) -> RankMemory:
        """Works, and says what was held."""
        batch, plan = work_rows(self._work)
        tally = self._tally
        if self._trainer is None:
            at_rest = dict(tally.held)
            tally.forget_peak()
            self._score(batch)
            return RankMemory(at_rest=at_rest, at_peak=dict(tally.at_peak), peak_phase="passes")
        assert self._work.loss is not None
        self._make_moments()
        at_rest = dict(tally.held)
        tally.forget_peak()
        self._trainer.forward_backward(batch, self._work.loss, plan)
        passes, passes_peak = dict(tally.at_peak), tally.peak
        tally.forget_peak()
        with tally.purpose("optimizer"):
            self._trainer.optim_step()
        step, step_peak = dict(tally.at_peak), tally.peak
        if device_kind == "cuda" and self._work.optimizer and self._work.optimizer.offload:
            # Moments are on the host, but for those of two groups of weights during a step.
            moments = at_rest["optimizer"]
            for held, brought in ((at_rest, 0), (passes, 0), (step, 4 * OFFLOAD_BYTES)):
                held["optimizer"] -= moments - min(moments, brought)
            passes_peak, step_peak = sum(passes.values()), sum(step.values())
        is_step = step_peak > passes_peak
        return RankMemory(
            at_rest=at_rest,
            at_peak=step if is_step else passes,
            peak_phase="step" if is_step else "passes",
        )

    def _make_moments(self) -> None:
        """Has the optimizer make its state, as the first step of a run does."""
        assert self._trainer is not None
        with self._tally.purpose("optimizer"):
            for parameter in self._trainer.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            # A pass for it would double the time of an estimate.
            self._trainer._optimizer.step()

    def _score(self, batch: Experience) -> None:
        rank_model = self._rank_model
        given = {"temperature": 1.0} if self._work.kind == "policy" else {}
        rank_model.run(
            rank_model.micro_batches(batch),
            lambda _number, _outputs: None,
            trains=False,
            arguments=lambda _: given,
            done=lambda _number: None,
        )


class _Behind(torch.autograd.Function):
    """Stands where the layers end: what a backward pass makes after it is of the layers."""

    @staticmethod
    def forward(ctx: Any, hidden_1SD: torch.Tensor, tally: Tally) -> torch.Tensor:
        ctx.tally = tally
        return hidden_1SD.view_as(hidden_1SD)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.tally.turn_to("activations")
        return gradient, None


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None  # it was just accumulated
    return weight.grad


def _model(work: RankWork, mesh: RankMesh, *, trainable: bool) -> CausalLm | ScoringModel:
    """The model as its service makes it."""
    common: dict[str, Any] = {"trainable": trainable, "mesh": mesh, "numerics": work.numerics}
    if work.kind == "policy":
        return CausalLm(work.model, **common)
    head = VALUE_HEAD if work.kind == "critic" else ScoreHead(per="row", origin="folder or new")
    return ScoringModel(work.model, head, **common)


def work_rows(work: RankWork) -> tuple[Experience, UpdatePlan]:
    """Rows that fill the passes, and the plan of a rank that holds them all."""
    names = {*INPUT_COLUMNS, "loss_mask"}
    if work.loss is not None:
        names |= set(make_loss(work.loss).columns)
    # Both rows of a pair share a pass.
    rows_per_unit = 2 if "pair_ids" in names else 1
    units = max(1, work.model.micro_batch_tokens // (rows_per_unit * work.row_tokens))
    num_rows = units * rows_per_unit * work.passes
    lengths = {
        "row": 1,
        "sequence": work.row_tokens,
        "completion": work.row_tokens - work.prompt_tokens,
        "text": 0,
    }
    columns = {}
    for name in names:
        kind = COLUMNS[name].kind
        rows = [[1] * lengths[kind] for _ in range(num_rows)]
        if kind == "sequence":
            # What must fit are rows that have nothing in common.
            beginnings = [[1 + number % 64, 1 + number // 64 % 64] for number in range(num_rows)]
            rows = [(own + row[2:])[: len(row)] for own, row in zip(beginnings, rows, strict=True)]
        columns[name] = Column.named(name, [row[0] for row in rows] if kind == "row" else rows)
    columns["prompt_lengths"] = Column.named("prompt_lengths", [work.prompt_tokens] * num_rows)
    if "pair_ids" in names:
        columns["pair_ids"] = Column.named("pair_ids", [row // 2 for row in range(num_rows)])
    if "preference" in names:
        preferences = [1.0 - 2.0 * (row % 2) for row in range(num_rows)]
        columns["preference"] = Column.named("preference", preferences)
    plan = UpdatePlan.of_mini_batch(
        [work.row_tokens] * num_rows, range(num_rows), rows_per_unit=rows_per_unit
    )
    return Experience(columns), plan


@contextmanager
def _made_of_nothing(valueless: Valueless) -> Iterator[None]:
    valueless.makes_valueless = True
    try:
        yield
    finally:
        valueless.makes_valueless = False


@contextmanager
def _gathers_seen(tally: Tally, valueless: Valueless | None) -> Iterator[None]:
    """Tells the tally what FSDP2 makes."""
    methods = {name: getattr(FSDPParamGroup, name) for name in _UNSHARDING}

    def seen(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with tally.purpose("gathers"):
                if valueless is None:
                    return method(*args, **kwargs)
                with _made_of_nothing(valueless):
                    return method(*args, **kwargs)

        return call

    for name, method in methods.items():
        setattr(FSDPParamGroup, name, seen(method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(FSDPParamGroup, name, method)
