"""Names, cuts and shapes of the factors of low-rank adapters (LoRA, arXiv 2106.09685).

Pure: no torch. A matrix W [out, in] with an adapter of rank r has two more parameters beside it:
A [r, in], named as the matrix's module with ".lora_A.weight", and B [out, r], with
".lora_B.weight", as PEFT names them. Tensor slices cut a factor where they cut its matrix.

A stack of experts [experts, out, in] has factors [experts, r, in] and [experts, out, r]. PEFT wraps
the module of the experts once for each stack, and names the factors of the inner one, gate_up_proj,
as those of a "base_layer". Its files lay the experts side by side: `stored_shape`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Factor: TypeAlias = Literal["A", "B"]
"""A narrows to the rank, B widens from it."""

FACTORS: tuple[Factor, Factor] = ("A", "B")

ALL_LINEAR = "all_linear"
"""The target that means every linear layer."""

EXPERTS = "experts"
"""The target that means both stacks of a layer's experts, which are no linear layers."""

STACKS = {
    "mlp.experts.base_layer": "mlp.experts.gate_up_proj",
    "mlp.experts": "mlp.experts.down_proj",
}
"""The stacks by the modules that PEFT names their factors after, in a layer."""


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """The sizes that decide which parameters an adapter has."""

    rank: int
    targets: tuple[str, ...]
    """Modules within a layer, e.g. "self_attn.q_proj", in the model's order."""

    @property
    def has_experts(self) -> bool:
        """Whether it stands beside stacks of experts."""
        return not STACKS.keys().isdisjoint(self.targets)

    def factors_of(self, module: str) -> tuple[str, ...]:
        """Names of the factors beside a module of a layer; none where it has no adapter."""
        if module not in self.targets:
            return ()
        return tuple(factor_name(module, factor) for factor in FACTORS)


def factor_name(module: str, factor: Factor) -> str:
    """Name of a factor beside a module, e.g. "mlp.up_proj.lora_A.weight"."""
    return f"{module}.lora_{factor}.weight"


def split_factor(name: str) -> tuple[str, Factor] | None:
    """Module and factor of a parameter's name; None for parameters that are no factor.

    Example: split_factor("mlp.up_proj.lora_A.weight") is ("mlp.up_proj", "A").
    """
    for factor in FACTORS:
        module = name.removesuffix(f".lora_{factor}.weight")
        if module != name:
            return module, factor
    return None


def is_factor(name: str) -> bool:
    """Whether a parameter is a factor of an adapter."""
    return split_factor(name) is not None


def adapted_parameter(module: str) -> str:
    """The parameter that factors of a module stand beside: its weight, or a stack of experts.

    Example: adapted_parameter("model.layers.0.mlp.experts") is
    "model.layers.0.mlp.experts.down_proj".
    """
    for own, stack in STACKS.items():
        if module == own or module.endswith(f".{own}"):
            return module.removesuffix(own) + stack
    return f"{module}.weight"


def factors_beside(parameter: str) -> tuple[str, str]:
    """Names of A and B beside a parameter; the other way round than `adapted_parameter`."""
    module = parameter.removesuffix(".weight")
    for own, stack in STACKS.items():
        if module == stack or module.endswith(f".{stack}"):
            module = module.removesuffix(stack) + own
    return factor_name(module, "A"), factor_name(module, "B")


def factor_shape(parameter: Sequence[int], factor: Factor, rank: int) -> tuple[int, ...]:
    """Shape of a factor beside a matrix [out, in] or a stack of them."""
    *experts, height, width = parameter
    return (*experts, rank, width) if factor == "A" else (*experts, height, rank)


def stored_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape in PEFT's files of a factor of this shape.

    Those of experts are [experts * r, in] and [out, r * experts] there. The columns of B are those
    of all experts for one row of A, then for the next.
    """
    if len(shape) < 3:
        return tuple(shape)
    number, rows, columns = shape
    is_a = name.endswith(factor_name("", "A"))
    return (number * rows, columns) if is_a else (rows, columns * number)


def chosen_targets(
    targets: Literal["all_linear"] | Sequence[str], present: Iterable[str]
) -> tuple[str, ...]:
    """The modules that get an adapter, in the model's order.

    Args:
        targets: "all_linear", or names: of the whole module within a layer, or of its last part;
            "all_linear" and EXPERTS may be among them.
        present: Linear modules of a layer, e.g. "self_attn.q_proj", and those of STACKS.

    Raises:
        ValueError: The model has no matrix of such a name; lists those that it has.
    """
    # Of experts both stacks or none, as one word.
    names = {
        name: (EXPERTS,) * 2 if name in STACKS else (name, name.rpartition(".")[2])
        for name in present
    }
    asked = {targets} if isinstance(targets, str) else set(targets)
    for target in asked - {ALL_LINEAR}:
        if not any(target in both for both in names.values()):
            own = ", ".join(dict.fromkeys(short for _, short in names.values()))
            raise ValueError(
                f"adapter.targets has {target!r}, but the layers of this model have no such "
                f"matrix: give {ALL_LINEAR}, or some of {own}"
            )
    return tuple(
        name
        for name, both in names.items()
        if not asked.isdisjoint(both) or (ALL_LINEAR in asked and name not in STACKS)
    )


def check_rank(rank: int, module: str, sizes: Sequence[int]) -> None:
    """Raises ValueError where a matrix [..., out, in] is smaller than the rank on a side."""
    if rank > min(sizes[-2:]):
        raise ValueError(
            f"adapter.rank is {rank}, but {module} has the shape {list(sizes)}: give at most "
            f"{min(sizes[-2:])}"
        )
