"""Names, cuts and shapes of the factors of low-rank adapters (LoRA, arXiv 2106.09685).

Pure: no torch. A matrix W [out, in] with an adapter of rank r has two more parameters beside it:
A [r, in], named as the matrix's module with ".lora_A.weight", and B [out, r], with
".lora_B.weight", as PEFT names them. Tensor slices cut a factor where they cut its matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Factor: TypeAlias = Literal["A", "B"]
"""A narrows to the rank, B widens from it."""

FACTORS: tuple[Factor, Factor] = ("A", "B")


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """The sizes that decide which parameters an adapter has."""

    rank: int
    targets: tuple[str, ...]
    """Modules within a layer, e.g. "self_attn.q_proj", in the model's order."""

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


def chosen_targets(
    targets: Literal["all_linear"] | Sequence[str], present: Iterable[str]
) -> tuple[str, ...]:
    """The modules that get an adapter, in the model's order.

    Args:
        targets: "all_linear", or names: of the whole module within a layer, or of its last part.
        present: Linear modules of a layer, e.g. "self_attn.q_proj".

    Raises:
        ValueError: The model has no matrix of such a name; lists those that it has.
    """
    present = tuple(dict.fromkeys(present))
    if targets == "all_linear":
        return present
    names = {name: (name, name.rpartition(".")[2]) for name in present}
    for target in targets:
        if not any(target in both for both in names.values()):
            own = ", ".join(short for _, short in names.values())
            raise ValueError(
                f"adapter.targets has {target!r}, but the layers of this model have no such "
                f"matrix: give all_linear, or some of {own}"
            )
    return tuple(name for name, both in names.items() if not set(both).isdisjoint(targets))


def check_rank(rank: int, module: str, sizes: tuple[int, int]) -> None:
    """Raises ValueError where a matrix [out, in] is no larger than the rank on its smaller side."""
    if rank > min(sizes):
        raise ValueError(
            f"adapter.rank is {rank}, but {module} has the shape {list(sizes)}: give at most "
            f"{min(sizes)}"
        )
