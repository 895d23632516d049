"""Adapters of a model in training: their first values, and how they come beside its layers.

Shape letters: I inputs, O outputs, R rank.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from rolemesh.engine.layout.adapters import (
    FACTORS,
    STACKS,
    check_rank,
    chosen_targets,
    factor_name,
    factor_shape,
    is_factor,
    split_factor,
)
from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.manifest import Box
from rolemesh.engine.models.adapters.adapter_files import AdapterFolder
from rolemesh.engine.parallel.experts.modules import experts_of
from rolemesh.engine.parallel.low_rank import give_adapter, give_experts_adapter
from rolemesh.engine.specs import AdapterSpec

_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""A and B."""

_IN_LAYER = re.compile(r"(?:.*\.)?layers\.\d+\.(.+)")


class AdapterValues:
    """What the factors of an adapter begin with: of its folder, or new.

    A new A is uniform in +-1/sqrt(I), as in PEFT, drawn for each name by itself, so that it does
    not depend on the ranks; a new B is zero.

    Example::

        values = AdapterValues(AdapterSpec(rank=8))
        values.read("model.layers.0.mlp.up_proj.lora_A.weight", (8, 576), ((0, 8), (0, 576)))
    """

    def __init__(self, spec: AdapterSpec) -> None:
        """Opens the folder, if one is given, and checks that it is an adapter of this kind.

        Raises:
            AdapterFolderError: It is not whole, or of another kind, rank or scale.
        """
        self._spec = spec
        self._folder = None if spec.start is None else AdapterFolder(spec.start, spec)

    def has(self, name: str) -> bool:
        """Whether the adapter gives a parameter: a factor, or a head that its folder holds."""
        return is_factor(name) or (self._folder is not None and name in self._folder)

    def refuse_others(self, expected: Iterable[str]) -> None:
        """Raises AdapterFolderError where the folder holds what the adapter does not have."""
        if self._folder is not None:
            self._folder.refuse_others(expected)

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
        """A box of a factor, float32, in memory of its own.

        Args:
            name: Of the factor, layers numbered as in the whole model.
            shape: Of the whole factor.
            box: The part that is wanted.

        Raises:
            AdapterFolderError: The folder lacks the factor, or has it in another shape.
        """
        if self._folder is not None:
            return self._folder.read(name, shape, box)
        sizes = [stop - start for start, stop in box]
        split = split_factor(name)
        if split is None or split[1] == "B":
            return torch.zeros(sizes)
        seed = hashlib.sha256(f"{self._spec.seed} {name}".encode()).digest()[:7]
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
        bound = 1 / math.sqrt(shape[1])
        whole = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        return whole[tuple(slice(start, stop) for start, stop in box)].clone()


def with_adapter(shape: DecoderShape, spec: AdapterSpec) -> DecoderShape:
    """The shape of a decoder whose layers have this adapter; see `DecoderShape.with_adapter`."""
    return shape.with_adapter(spec.rank, spec.targets)


def attach_empty(lm: Any, spec: AdapterSpec, shape: DecoderShape) -> None:
    """Puts factors without values beside the layers of a decoder of which a rank holds a part.

    Args:
        lm: On the meta device, its stage and slice cut out.
        spec: Of the adapter.
        shape: Of the whole model, with the adapter.
    """
    assert shape.adapter is not None

    def empty(module: str, parameter: torch.Tensor) -> _Pair:
        a, b = factor_shapes(module, parameter, spec.rank).values()
        return parameter.new_empty(a), parameter.new_empty(b)

    _give(lm, shape.adapter.targets, spec.scale, empty)


def attach(lm: Any, spec: AdapterSpec) -> frozenset[str]:
    """Puts an adapter beside the layers of a whole model, with its first values.

    Args:
        lm: A transformers model, of any family.
        spec: Of the adapter.

    Returns:
        Parameters that have the adapter's values: its factors, and a head that its folder holds.

    Raises:
        ValueError: The model has no such matrix, or one that is too small for the rank.
        AdapterFolderError: As `AdapterValues`.
    """
    values = AdapterValues(spec)

    def read(module: str, parameter: torch.Tensor) -> _Pair:
        a, b = (
            values.read(name, shape, tuple((0, size) for size in shape))
            for name, shape in factor_shapes(module, parameter, spec.rank).items()
        )
        return a, b

    targets = set(map(module_in_layer, adapted_parameters(lm, spec)))
    _give(lm, targets, spec.scale, read)
    own = dict(lm.named_parameters())
    values.refuse_others(name for name in own if is_factor(name) or name.startswith("score."))
    with torch.no_grad():
        for name, parameter in own.items():
            if not is_factor(name) and values.has(name):
                box = tuple((0, size) for size in parameter.shape)
                parameter.copy_(values.read(name, tuple(parameter.shape), box))
    return frozenset(name for name in own if values.has(name))


def adapted_parameters(lm: Any, spec: AdapterSpec) -> dict[str, torch.Tensor]:
    """The matrices and stacks of a whole model that an adapter stands beside.

    Returns:
        By the modules that their factors are named after.

    Raises:
        ValueError: The model has no such matrix, or one that is too small for the rank.
    """
    present = {name: linear.weight for name, linear in linears_of(lm)}
    for _, stacks in _experts_of_layers(lm):
        present.update(stacks.values())
    targets = chosen_targets(spec.targets, map(module_in_layer, present))
    found = {name: one for name, one in present.items() if module_in_layer(name) in targets}
    for name, parameter in found.items():
        check_rank(spec.rank, module_in_layer(name), parameter.shape)
    return found


def factor_shapes(module: str, parameter: torch.Tensor, rank: int) -> dict[str, tuple[int, ...]]:
    """Shapes of A and B beside a parameter, by their names."""
    return {
        factor_name(module, factor): factor_shape(parameter.shape, factor, rank)
        for factor in FACTORS
    }


def linears_of(lm: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers of the backbone and their names in the model; no head is among them."""
    heads = {id(lm.get_output_embeddings()), id(getattr(lm, "score", None))}
    inside = {id(module) for module in lm.base_model.modules()}
    for name, module in lm.named_modules():
        if isinstance(module, nn.Linear) and id(module) in inside - heads:
            yield name, module


def module_in_layer(name: str) -> str:
    """Name within its layer, e.g. "self_attn.q_proj" of "model.layers.3.self_attn.q_proj"."""
    match = _IN_LAYER.fullmatch(name)
    return match[1] if match else name


def _give(
    lm: Any,
    targets: Collection[str],
    scale: float,
    make: Callable[[str, torch.Tensor], _Pair],
) -> None:
    """Puts factors beside the layers and the experts that are targets."""
    for name, linear in linears_of(lm):
        if module_in_layer(name) in targets:
            give_adapter(linear, *make(name, linear.weight), scale)
    for experts, stacks in _experts_of_layers(lm):
        if set(stacks) <= set(targets):
            factors = {module: make(*named) for module, named in stacks.items()}
            give_experts_adapter(experts, factors, scale)


def _experts_of_layers(
    lm: nn.Module,
) -> Iterator[tuple[nn.Module, dict[str, tuple[str, torch.Tensor]]]]:
    """Modules of experts, and by the modules of STACKS their full names and the stacks."""
    experts = set(experts_of(lm))
    for name, module in lm.named_modules():
        if module in experts and module_in_layer(name) in STACKS:
            layer = name.removesuffix(module_in_layer(name))
            yield (
                module,
                {
                    own: (layer + own, lm.get_parameter(layer + stack))
                    for own, stack in STACKS.items()
                },
            )
