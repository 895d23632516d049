"""Muon: steps of matrices along an orthogonalised mean of gradients.

For the matrices of layers alone; `optimizer.py` has AdamW for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rolemesh.engine.hardware.cpu_threads import threads_for_each, threads_worth
from rolemesh.engine.hardware.devices import device_of, kind_of
from rolemesh.engine.layout.boxes import train_layout, whole_layout
from rolemesh.engine.layout.manifest import WeightLayout
from rolemesh.engine.models.layer_matrices import Rows, layer_matrices
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.parallel.agreement import gather_facts
from rolemesh.engine.parallel.matrix_owners import MatrixOwners, owners_of, rounds_of
from rolemesh.engine.specs import MuonSpec
from rolemesh.engine.train.optimizers.newton_schulz import multiply_adds, orthogonalised
from rolemesh.engine.weights.sharded_tensors import tensors_manifest

_RMS = 0.2
"""Root mean square of an element of AdamW's steps, as measured by arXiv 2502.16982, section 2.2."""


def rate_factor(rows: int, columns: int) -> float:
    """What the rate of AdamW is multiplied by for an orthogonalised step of a matrix.

    Elements of U V^T have the root mean square 1 / sqrt(max(rows, columns)), those of AdamW's steps
    about 0.2 (arXiv 2502.16982, eq. 4; torch's adjust_lr_fn "match_rms_adamw").
    """
    return _RMS * math.sqrt(max(rows, columns))


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024, arXiv 2502.16982) over this rank's parts of some matrices.

    With gradient G, mean M, momentum m and rate r, a step is

        M = m M + (1 - m) G
        W = (1 - r d) W - r f O(m M + (1 - m) G)

    where O orthogonalises each matrix by itself (without `nesterov`: O(M)), d is the decay and f
    the `rate_factor`. Mean and step are elementwise; for O each matrix is brought whole to one
    rank of its stage, in the type of the model's products. Equal to torch.optim.Muon with
    adjust_lr_fn "match_rms_adamw", bit by bit where that type is bfloat16.

    The state of a weight is `exp_avg`, its M, named as AdamW's first moment, which it is.
    Owned by the rank's compute thread; with many ranks all of a stage step together.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        matrices: Mapping[str, Rows],
        spec: MuonSpec,
        *,
        dtype: torch.dtype,
        layout: WeightLayout,
        rank: int,
        owners: MatrixOwners | None,
    ) -> None:
        """Takes the weights.

        Args:
            weights: This rank's parts, by name; float32 [rows, columns], or stacks of such.
            matrices: What matrices lie in each of the whole parameters.
            spec: Of the optimizer; the rate is set before each step.
            dtype: Of products.
            layout: Where the parts of each rank stand in the whole parameters.
            rank: This one.
            owners: The way to whole matrices; None where this rank holds all of them.
        """
        super().__init__(
            list(weights.values()),
            {"lr": spec.learning_rate, "weight_decay": spec.weight_decay},
        )
        self._named = weights
        self._matrices = matrices
        self._spec = spec
        self._dtype = dtype
        self._owners = owners
        self._stretches = {
            name: list(_stretches(matrices[name], layout, rank, name)) for name in weights
        }
        """Rows of this rank's part that are of one matrix, and the factor of its rate."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Makes one step."""
        if closure is not None:
            raise ValueError("closure is given: compute the gradients before the step, once")
        (group,) = self.param_groups
        rate, decay = group["lr"], group["weight_decay"]
        weights = list(self._named.values())
        device = weights[0].device
        with threads_for_each(weights, device):
            wanted = self._wanted()
        if self._owners is not None:
            wholes = self._owners.gather(wanted)
            found = self._owners.scatter({name: self._made(name, wholes[name]) for name in wholes})
        else:
            found = {name: self._made(name, wanted[name]) for name in wanted}
        with threads_for_each(weights, device):
            for name, step in found.items():
                weight = self._named[name]
                weight.mul_(1 - rate * decay)
                for rows, factor in self._stretches[name]:
                    weight[rows].add_(step[rows], alpha=-rate * factor)

    def _wanted(self) -> dict[str, torch.Tensor]:
        """What is to be orthogonalised, this rank's parts; takes the gradients into the means."""
        momentum = self._spec.momentum
        found = {}
        for name, weight in self._named.items():
            gradient = weight.grad
            if gradient is None:
                if self._owners is None:
                    continue
                if weight.numel():
                    raise ValueError(
                        f"{name} has no gradient on this rank: make a pass that reaches all "
                        "matrices before the step"
                    )
                # A part without elements.
                gradient = torch.zeros_like(weight)
            state = self.state[weight]
            if "exp_avg" not in state:
                state["exp_avg"] = torch.zeros_like(weight)
            mean = state["exp_avg"]
            mean.lerp_(gradient, 1 - momentum)
            step = gradient.lerp(mean, momentum) if self._spec.nesterov else mean
            found[name] = step.to(self._dtype)
        return found

    def _made(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Each matrix of a parameter orthogonalised."""
        made = whole.new_empty(whole.shape)
        flat, flat_made = whole.flatten(0, -2), made.flatten(0, -2)
        for first, last in self._matrices[name]:
            matrix_RC = flat[first:last]
            work = multiply_adds(*matrix_RC.shape, steps=1)
            # By the whole matrix, so that every layout takes as many threads for it.
            with threads_worth(work, matrix_RC.device):
                flat_made[first:last] = orthogonalised(matrix_RC, steps=self._spec.ns_steps)
        return made


def make_muons(
    spec: MuonSpec, rank_model: RankModel, weights: Mapping[str, nn.Parameter]
) -> list[Muon]:
    """The optimizers of the matrices among a rank's weights: one a round, in the order of steps.

    Rounds are the same on all ranks of a stage, which call this together.

    Args:
        spec: Of the optimizer.
        rank_model: The model.
        weights: Its trained parameters, this rank's parts, by Hugging Face name.

    Raises:
        ValueError: There is no matrix of a layer among them.
    """
    model, mesh = rank_model.model, rank_model.mesh
    matrices = {name: rows for name, rows in layer_matrices(model).items() if name in weights}
    if not matrices:
        raise ValueError(
            "optimizer.type is 'muon', but what is trained has no matrix of a layer (an adapter's "
            "factors are none): leave the type out, which takes AdamW"
        )
    # Ranks on unlike machines must agree on the type in which matrices travel.
    is_fast = device_of(kind_of(rank_model.device)).multiplies_bfloat16
    all_fast = all(gather_facts(is_fast, mesh.stage, rank_model.device))
    is_narrow = model.spec.compute_dtype == "bfloat16" and all_fast
    dtype = torch.bfloat16 if is_narrow else torch.float32
    if mesh.world.size == 1:
        layout = whole_layout(tensors_manifest({name: weights[name] for name in matrices}))
    else:
        assert model.shape is not None  # the loader of a model of several ranks sees to it
        layout = train_layout(model.shape, mesh.layout.train, trained_only=True)
    sizes = {name: math.prod(layout.manifest[name].shape) for name in matrices}
    loads = [0] * mesh.stage.size
    made = []
    for names in rounds_of(sizes, mesh.stage.size, dtype.itemsize):
        owners = None
        if mesh.stage.size > 1:
            work = {name: _work(matrices[name], layout.manifest[name].shape) for name in names}
            owners = MatrixOwners(
                owners_of(work, loads), layout, mesh.stage, dtype=dtype, device=rank_model.device
            )
        made.append(
            Muon(
                {name: weights[name] for name in names},
                {name: matrices[name] for name in names},
                spec,
                dtype=dtype,
                layout=layout,
                rank=mesh.rank,
                owners=owners,
            )
        )
    return made


def _work(rows: Rows, shape: tuple[int, ...]) -> int:
    """What the matrices of a parameter cost its owner."""
    return sum(multiply_adds(last - first, shape[-1], steps=1) for first, last in rows)


def _stretches(
    matrices: Rows, layout: WeightLayout, rank: int, name: str
) -> Iterator[tuple[slice, float]]:
    sizes = layout.manifest[name].shape
    if len(sizes) == 3:
        # The matrices of a stack are alike.
        first, last = matrices[0]
        yield slice(None), rate_factor(last - first, sizes[2])
        return
    for piece in layout.ranks[rank].pieces:
        if piece.tensor != name:
            continue
        start, stop = piece.box[0]
        for first, last in matrices:
            low, high = max(start, first), min(stop, last)
            if low < high:
                at = piece.origin[0] - start
                yield slice(at + low, at + high), rate_factor(last - first, sizes[1])
