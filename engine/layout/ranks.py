"""Parallel layouts as rank arithmetic: what each rank computes in training and in generation.

Pure: no torch, no process group. The groups of HybridFlow (arXiv 2409.19256, section 5), p-t-d for
training and p_g-t_g-d_g-d for generation on the same ranks. Process groups are made of them in
`engine/parallel/mesh.py`, weights are cut by them in `engine/weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

RankOrder: TypeAlias = Literal["tp-pp-dp", "tp-dp-pp"]
"""Which coordinate moves fastest with the rank, first to last. The paper numbers ranks
"tp-pp-dp"; Megatron-core has pipeline stages outermost."""

Grouping: TypeAlias = Literal["interval", "consecutive"]
""""interval": generation groups take ranks at regular intervals, so that each rank's training shard
lies inside its generation shard (the paper's HybridFlow). "consecutive": neighbours, as in training
(its HybridFlow-V), kept for comparison."""

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Ranks by group; each rank is in exactly one."""


class LayoutError(ValueError):
    """Sizes that do not fit together: names them, and what would fit."""


@dataclass(frozen=True, slots=True, order=True)
class TrainCoordinates:
    """Where a rank stands in training."""

    pp: int
    """Pipeline stage, 0 <= pp < p."""
    tp: int
    """Tensor slice, 0 <= tp < t."""
    dp: int
    """Data-parallel replica, 0 <= dp < d."""


@dataclass(frozen=True, slots=True, order=True)
class GenerateCoordinates:
    """Where a rank stands in generation."""

    pp: int
    """Pipeline stage, 0 <= pp < p_g."""
    tp: int
    """Tensor slice, 0 <= tp < t_g."""
    micro: int
    """Micro-data-parallel replica within its training replica, 0 <= micro < d_g."""
    dp: int
    """Training replica that it belongs to, 0 <= dp < d."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLayout:
    """Sizes p, t and d of training, and how parameters are cut over the data axis.

    Example: `TrainLayout(tp=4, dp=2)` is the paper's 1-4-2; its tensor groups are (0, 1, 2, 3) and
    (4, 5, 6, 7), its data groups (0, 4), (1, 5), (2, 6), (3, 7).
    """

    pp: int = 1
    """Pipeline stages."""
    tp: int = 1
    """Tensor slices."""
    dp: int = 1
    """Data-parallel replicas."""
    fsdp: int = 1
    """Neighbours on the data axis that cut each parameter among them: 1 replicates (plain data
    parallelism), dp cuts over all (FSDP), a divisor between cuts within and replicates across
    (HSDP)."""
    ep: int = 1
    """Neighbours on the data axis that share the experts of each layer out: each holds as many
    whole ones, computes them for the rows of all, and cuts them no further than fsdp / ep."""
    cp: int = 1
    """Neighbours on the data axis that take the same rows, and of each packed row an even part
    (context parallelism). So dp / cp replicas share the rows out."""
    order: RankOrder = "tp-pp-dp"
    """How ranks are numbered."""

    def __post_init__(self) -> None:
        for name in ("pp", "tp", "dp", "fsdp", "ep", "cp"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}: give at least 1")
        for name in ("fsdp", "ep", "cp"):
            size = getattr(self, name)
            if self.dp % size:
                raise LayoutError(
                    f"{name} {size} does not divide dp {self.dp}: give one of {_divisors(self.dp)}"
                )
        if self.fsdp % self.ep and self.ep % self.fsdp:
            raise LayoutError(
                f"ep {self.ep} neither divides fsdp {self.fsdp} nor is a multiple: experts are cut "
                f"over fsdp / ep ranks; give one of {_divisors(self.fsdp)}"
            )
        if self.order not in ("tp-pp-dp", "tp-dp-pp"):
            raise LayoutError(f"order is {self.order!r}: give 'tp-pp-dp' or 'tp-dp-pp'")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.pp * self.tp * self.dp

    @property
    def num_parts(self) -> int:
        """Parts that rows are dealt into: one for each replica, of cp ranks on the data axis."""
        return self.dp // self.cp

    def described(self) -> str:
        """The paper's way, p-t-d, e.g. "1-8-2 fsdp 2"."""
        text = f"{self.pp}-{self.tp}-{self.dp}"
        sizes = {name: getattr(self, name) for name in ("fsdp", "ep", "cp")}
        return " ".join([text, *(f"{name} {size}" for name, size in sizes.items() if size > 1)])

    def flag(self) -> str:
        """What `rolemesh serve --layout` reads, e.g. "pp=1,tp=2,dp=2,fsdp=2,order=tp-pp-dp".

        Ranks that share experts or a row out are named where there are some.
        """
        texts = self.as_texts()
        for name in ("ep", "cp"):
            if getattr(self, name) == 1:
                del texts[name]
        return ",".join(f"{name}={text}" for name, text in texts.items())

    def as_texts(self) -> dict[str, str]:
        """All sizes by name, as they travel."""
        return {one.name: str(getattr(self, one.name)) for one in fields(self)}

    def coordinates(self, rank: int) -> TrainCoordinates:
        """Where a rank stands."""
        check_rank(rank, self.world_size)
        tp, outer = rank % self.tp, rank // self.tp
        if self.order == "tp-pp-dp":
            return TrainCoordinates(pp=outer % self.pp, tp=tp, dp=outer // self.pp)
        return TrainCoordinates(pp=outer // self.dp, tp=tp, dp=outer % self.dp)

    def rank(self, *, pp: int, tp: int, dp: int) -> int:
        """The rank that stands there; raises LayoutError when no rank does."""
        for name, at in (("pp", pp), ("tp", tp), ("dp", dp)):
            if not 0 <= at < getattr(self, name):
                raise LayoutError(f"{name} is {at}: give 0 to {getattr(self, name) - 1}")
        outer = dp * self.pp + pp if self.order == "tp-pp-dp" else pp * self.dp + dp
        return outer * self.tp + tp

    def tp_groups(self) -> Groups:
        """Ranks that hold the slices of the same stage and replica."""
        return _grouped(self, lambda at: (at.pp, at.dp))

    def pp_groups(self) -> Groups:
        """Ranks that hold the stages of one pipeline, first stage first."""
        return _grouped(self, lambda at: (at.tp, at.dp))

    def dp_groups(self) -> Groups:
        """Ranks that hold the same stage and slice (or cut it among them)."""
        return _grouped(self, lambda at: (at.pp, at.tp))

    def cp_groups(self) -> Groups:
        """Ranks of one stage and slice that cut each packed row among them, its beginning first."""
        return _grouped(self, lambda at: (at.pp, at.tp, at.dp // self.cp))

    def part_groups(self) -> Groups:
        """Ranks that stand at one place of all replicas: each has another part of the rows."""
        return _grouped(self, lambda at: (at.pp, at.tp, at.dp % self.cp))

    def fsdp_groups(self) -> Groups:
        """Ranks that cut the parameters of one stage and slice among them."""
        return _grouped(self, lambda at: (at.pp, at.tp, at.dp // self.fsdp))

    def replicate_groups(self) -> Groups:
        """Ranks that hold the very same parameters."""
        return _grouped(self, lambda at: (at.pp, at.tp, at.dp % self.fsdp))

    @property
    def expert_fsdp(self) -> int:
        """Ranks that cut a rank's experts among them."""
        return max(1, self.fsdp // self.ep)

    def expert_groups(self) -> Groups:
        """Ranks that share the experts of one stage and slice out, in the order of experts."""
        return _grouped(self, lambda at: (at.pp, at.tp, at.dp // self.ep))

    def expert_fsdp_groups(self) -> Groups:
        """Ranks that cut the same experts among them."""
        cut = max(self.fsdp, self.ep)
        return _grouped(
            self,
            lambda at: (
                (at.pp, at.tp, at.dp // cut, at.dp % self.ep)
                if self.fsdp > self.ep
                else (at.pp, at.tp, at.dp)
            ),
        )

    def expert_replicate_groups(self) -> Groups:
        """Ranks that hold the very same parts of experts."""
        return _grouped(self, lambda at: (at.pp, at.tp, at.dp % max(self.fsdp, self.ep)))

    def stage_groups(self) -> Groups:
        """Ranks that together hold one stage: its slices, of all replicas."""
        return _grouped(self, lambda at: (at.pp,))

    def model_groups(self) -> Groups:
        """Ranks of one data-parallel replica: they see the same rows."""
        return _grouped(self, lambda at: (at.dp // self.cp,))


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateLayout:
    """Sizes p_g and t_g of generation; d_g follows from training."""

    pp: int = 1
    """Pipeline stages."""
    tp: int = 1
    """Tensor slices."""
    grouping: Grouping = "interval"
    """How ranks form groups."""

    def __post_init__(self) -> None:
        for name in ("pp", "tp"):
            if getattr(self, name) < 1:
                raise LayoutError(f"generate.{name} is {getattr(self, name)}: give at least 1")
        if self.grouping not in ("interval", "consecutive"):
            raise LayoutError(
                f"generate.grouping is {self.grouping!r}: give 'interval' or 'consecutive'"
            )


@dataclass(frozen=True, slots=True)
class HybridLayout:
    """Training and generation on the same ranks.

    With a = t / t_g and b = p / p_g, a training replica becomes d_g = a * b generation replicas.
    Invariant ("interval"): the stages and slices that a rank trains are among those it generates
    with.

    Example, the paper's Fig. 8b: `HybridLayout(TrainLayout(tp=4, dp=2), GenerateLayout(tp=2))` has
    generation tensor groups (0, 2), (1, 3), (4, 6), (5, 7) and micro-data-parallel groups (0, 1),
    (2, 3), (4, 5), (6, 7).
    """

    train: TrainLayout
    """Layout of training."""
    generate: GenerateLayout = field(default_factory=GenerateLayout)
    """Layout of generation."""

    def __post_init__(self) -> None:
        for name, held in (("tp", self.train.tp), ("pp", self.train.pp)):
            asked = getattr(self.generate, name)
            if held % asked:
                raise LayoutError(
                    f"generate.{name} {asked} does not divide train.{name} {held}: give one of "
                    f"{_divisors(held)}"
                )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.train.world_size

    @property
    def slice_ratio(self) -> int:
        """Training slices in one generation slice: a = t / t_g."""
        return self.train.tp // self.generate.tp

    @property
    def stage_ratio(self) -> int:
        """Training stages in one generation stage: b = p / p_g."""
        return self.train.pp // self.generate.pp

    @property
    def micro_dp(self) -> int:
        """d_g: generation replicas in one training replica."""
        return self.slice_ratio * self.stage_ratio

    @property
    def num_replicas(self) -> int:
        """Generation replicas in all, which is the number of chunks that prompts are cut into."""
        return self.train.dp * self.micro_dp

    def coordinates(self, rank: int) -> GenerateCoordinates:
        """Where a rank stands in generation."""
        at = self.train.coordinates(rank)
        if self.generate.grouping == "interval":
            a, b = self.slice_ratio, self.stage_ratio
            return GenerateCoordinates(
                pp=at.pp // b, tp=at.tp // a, micro=(at.pp % b) * a + at.tp % a, dp=at.dp
            )
        local = at.pp * self.train.tp + at.tp
        outer = local // self.generate.tp
        return GenerateCoordinates(
            pp=outer % self.generate.pp,
            tp=local % self.generate.tp,
            micro=outer // self.generate.pp,
            dp=at.dp,
        )

    def chunk(self, rank: int) -> int:
        """Number of the generation replica that a rank belongs to, and of its chunk of prompts."""
        at = self.coordinates(rank)
        return at.dp * self.micro_dp + at.micro

    def tp_groups(self) -> Groups:
        """Ranks that hold the slices of one generation replica's stage."""
        return _grouped(self, lambda at: (at.pp, at.micro, at.dp))

    def pp_groups(self) -> Groups:
        """Ranks that hold the stages of one generation replica's slice."""
        return _grouped(self, lambda at: (at.tp, at.micro, at.dp))

    def micro_dp_groups(self) -> Groups:
        """Ranks of one training replica that hold the same generation shard."""
        return _grouped(self, lambda at: (at.pp, at.tp, at.dp))

    def replicas(self) -> Groups:
        """Ranks of each generation replica, in chunk order, ordered by (stage, slice)."""
        ranks = sorted(
            range(self.world_size), key=lambda rank: (self.chunk(rank), self.coordinates(rank))
        )
        size = self.generate.pp * self.generate.tp
        return tuple(tuple(ranks[at : at + size]) for at in range(0, len(ranks), size))

    def torch_ranks(self) -> tuple[int, ...]:
        """The number under which each rank joins torch's world.

        vLLM takes neighbours of torch's world for one replica (order: replica, stage, slice), so
        the ranks of a replica are numbered next to each other there. Rank 0 stays 0.
        """
        numbers = [0] * self.world_size
        for number, rank in enumerate(rank for replica in self.replicas() for rank in replica):
            numbers[rank] = number
        return tuple(numbers)


def check_rank(rank: int, world_size: int) -> None:
    """Raises LayoutError unless 0 <= rank < world_size."""
    if not 0 <= rank < world_size:
        raise LayoutError(f"rank is {rank}: give 0 to {world_size - 1}")


def _grouped(layout: TrainLayout | HybridLayout, key: Callable[[Any], tuple[int, ...]]) -> Groups:
    """Ranks with equal keys of their coordinates, in rank order; groups by their first rank."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world_size):
        groups.setdefault(key(layout.coordinates(rank)), []).append(rank)
    return tuple(tuple(group) for group in groups.values())


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
