"""Layouts that a plan may choose: how a model is cut over ranks, and how it keeps its tensors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.engine.layout.ranks import LayoutError, TrainLayout
from rolemesh.engine.layout.slices import check_row_cuts, check_slices

Recompute = Literal["none", "full"]


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Layout:
    """How one role lies on its ranks: p-t-d for passes, p_g-t_g for sampling.

    Example: the paper's 1-8-2 that samples with 1-2 is `Layout(tp=8, dp=2, generate_tp=2)`.
    """

    pp: int = 1
    tp: int = 1
    dp: int = 1
    fsdp: int = 1
    """Neighbours on the data axis that cut each parameter: 1 or dp."""
    ep: int = 1
    """Neighbours on the data axis that share the experts of each layer out."""
    cp: int = 1
    """Neighbours on the data axis that cut each packed row among them."""
    generate_pp: int = 1
    generate_tp: int = 1
    micro_batch_tokens: int = 4096
    """Most tokens of a pass, over all ranks that cut its rows."""
    recompute: Recompute = "none"
    offload: bool = False
    """Whether moments lie in host memory between steps."""

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.pp * self.tp * self.dp

    @property
    def replicas(self) -> int:
        """Generation replicas."""
        return self.world_size // (self.generate_pp * self.generate_tp)

    def described(self) -> str:
        """Its training as `TrainLayout.described`."""
        return self.train.described()

    @property
    def train(self) -> TrainLayout:
        """That of training or scoring."""
        return TrainLayout(
            pp=self.pp, tp=self.tp, dp=self.dp, fsdp=self.fsdp, ep=self.ep, cp=self.cp
        )

    @property
    def own_tokens(self) -> int:
        """Most tokens of a pass that one rank computes."""
        return -(-self.micro_batch_tokens // self.cp)

    @property
    def expert_fsdp(self) -> int:
        """Neighbours that cut a rank's experts."""
        return max(1, self.fsdp // self.ep)

    @property
    def replicas_of_experts(self) -> int:
        """Ranks that hold the very same parts of experts."""
        return self.dp // max(self.fsdp, self.ep)


@dataclass(frozen=True, kw_only=True, slots=True)
class Freedom:
    """What may be chosen; what is not listed stays as it is."""

    most_slices: int = 8
    """Tensor slices, and those of sampling: the devices of a machine, as the paper's U."""
    cuts_over_data: tuple[bool, ...] = (True,)
    """Whether parameters may be cut over the data axis (FSDP), or lie whole on each replica."""
    shares_experts: bool = True
    """Whether the experts of a mixture may be shared out over the data axis."""
    cuts_rows: bool = False
    """Whether ranks may cut packed rows among them."""
    generate_stages: bool = False
    """Whether sampling may have stages; vLLM's external launcher has none."""
    generate_slices: bool = True
    """Whether sampling may have slices; plain transformers has none."""
    same_generation: bool = False
    """Sampling has the cut of training: of a role that only samples, or as NeMo-Aligner has it."""
    micro_batch_tokens: tuple[int, ...] = (4096, 8192, 16384)
    recompute: tuple[Recompute, ...] = ("none", "full")
    offload: tuple[bool, ...] = (False, True)


def layouts(
    model: Model, most_ranks: int, freedom: Freedom, *, trains: bool, samples: bool
) -> Iterator[Layout]:
    """All layouts of a model on at most so many ranks.

    Sizes of the data axis are all up to 16, then multiples of 8, and of 64 above 128: an axis
    between them gains less than a twentieth. Of stage numbers that give the longest stage equally
    many layers, the smallest. Experts are shared out over divisors of the data axis. Rows are cut
    by ranks of one machine where passes are as short as they can be: longer ones would rather be
    shortened. A role that only samples has whole rows.

    Args:
        model: What is cut.
        most_ranks: Devices that there are.
        freedom: What may be chosen.
        trains: Whether it has optimizer steps; else it keeps nothing for a backward pass.
        samples: Whether it generates on the same ranks.
    """
    for pp, tp, dp in _train_sizes(model, most_ranks, freedom):
        cuts = sorted({dp if cuts_over_data else 1 for cuts_over_data in freedom.cuts_over_data})
        shortest = min(freedom.micro_batch_tokens)
        row_cuts = [1] if samples and not trains else _row_cuts(model, tp, dp, freedom)
        passes = [
            (tokens, cp)
            for tokens in freedom.micro_batch_tokens
            for cp in (row_cuts if tokens == shortest else [1])
        ]
        for (
            (generate_pp, generate_tp),
            fsdp,
            ep,
            (tokens, cp),
            recompute,
            offload,
        ) in itertools.product(
            _generate_sizes(pp, tp, freedom, samples),
            cuts,
            _expert_sizes(model, dp, freedom),
            passes,
            freedom.recompute if trains else ("none",),
            freedom.offload if trains else (False,),
        ):
            yield Layout(
                pp=pp,
                tp=tp,
                dp=dp,
                fsdp=fsdp,
                ep=ep,
                cp=cp,
                generate_pp=generate_pp,
                generate_tp=generate_tp,
                micro_batch_tokens=tokens,
                recompute=recompute,
                offload=offload,
            )


def data_sizes(most: int) -> Iterator[int]:
    """Sizes of a data axis that are tried."""
    for dp in range(1, most + 1):
        if dp <= 16 or (dp % 8 == 0 and dp <= 128) or dp % 64 == 0:
            yield dp


def _train_sizes(model: Model, most_ranks: int, freedom: Freedom) -> Iterator[tuple[int, int, int]]:
    for tp in range(1, min(freedom.most_slices, most_ranks) + 1):
        try:
            check_slices(model.shape, tp)
        except LayoutError:
            continue
        longest = None
        for pp in range(1, min(model.shape.num_layers, most_ranks // tp) + 1):
            if longest == (longest := -(-model.shape.num_layers // pp)):
                continue
            for dp in data_sizes(most_ranks // (tp * pp)):
                yield pp, tp, dp


def _expert_sizes(model: Model, dp: int, freedom: Freedom) -> list[int]:
    """Numbers of ranks that may share the experts out."""
    experts = model.shape.experts
    if experts is None or not freedom.shares_experts:
        return [1]
    return _divisors(math.gcd(dp, experts.number))


def _row_cuts(model: Model, tp: int, dp: int, freedom: Freedom) -> list[int]:
    """Numbers of ranks that may cut rows: those that can share a slice's heads out."""
    if not freedom.cuts_rows:
        return [1]
    found = []
    for cp in _divisors(math.gcd(dp, model.shape.num_heads // tp)):
        if tp * cp > max(tp, freedom.most_slices):
            break
        try:
            check_row_cuts(model.shape, TrainLayout(tp=tp, dp=cp, cp=cp))
        except LayoutError:
            continue
        found.append(cp)
    return found


def _generate_sizes(pp: int, tp: int, freedom: Freedom, samples: bool) -> Iterator[tuple[int, int]]:
    if not samples:
        yield 1, 1
    elif freedom.same_generation:
        if (pp == 1 or freedom.generate_stages) and (tp == 1 or freedom.generate_slices):
            yield pp, tp
    else:
        for generate_pp in _divisors(pp) if freedom.generate_stages else (1,):
            for generate_tp in _divisors(tp) if freedom.generate_slices else (1,):
                yield generate_pp, generate_tp


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
