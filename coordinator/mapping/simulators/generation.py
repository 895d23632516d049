"""Simulator of generation: seconds in which replicas sample their share of the rows.

Continuous batching: a replica decodes as many rows together as its keys and values have room for,
and takes the next one when one ends. A decoding step reads the weights and all keys and values
once, or takes what its products take; prompts are computed before.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rolemesh.coordinator.mapping.job.layouts import Layout
from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.coordinator.mapping.job.systems import System
from rolemesh.coordinator.mapping.job.work import Lengths, Work
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup
from rolemesh.coordinator.mapping.simulators.memory import rank_trained

GRAPH_BYTES = 1 << 30
"""CUDA graphs of all batch sizes: see `engine/fit/sampler.py`, which says how vLLM divides."""

PASS_TOKENS = 8192
"""Tokens of the largest pass of a sampler."""


class NoRoomError(ValueError):
    """A sampler that cannot hold one row of the greatest length; says how many bytes it lacks."""

    def __init__(self, missing: int) -> None:
        """Takes the bytes that are missing on each device."""
        super().__init__(f"{missing / 2**30:.1f} GiB too little for one row")
        self.missing = missing


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationSeconds:
    """Where the seconds of a generation go."""

    prompts: float
    """Computing prompts."""
    reads: float
    """Decoding: reading weights, keys and values, or products where those take longer."""
    slices: float
    """Decoding: all-reduces of slices, and sends between stages."""
    host: float
    """Decoding: the sampler's host program."""
    steps: int
    """Decoding steps of the busiest replica."""
    together: int
    """Rows that a replica decodes together at most."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.prompts + self.reads + self.slices + self.host


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerBytes:
    """What a sampler takes on each device of a replica."""

    fixed: int
    """Weights, the largest pass, graphs."""
    token: float
    """Keys and values of a token."""


def sampler_bytes(model: Model, layout: Layout, system: System, most_rows: int) -> SamplerBytes:
    """As `engine/fit/sampler.py` has it for vLLM, for stages and mixtures too.

    The slot of an adapter counts as no larger than the adapter.
    """
    ranks = layout.generate_pp * layout.generate_tp
    shape, item = model.shape, system.sampled_bytes
    weights = model.num_parameters * item
    if shape.is_tied:
        # The head is cast from the embedding, and is then a tensor of its own.
        weights += 4 * model.head_parameters
    else:
        weights += (4 - item) * model.head_parameters
    if system.shares_weights:
        weights = 0
    slot = 0.0
    if shape.adapter is not None:
        as_it_samples = Layout(pp=layout.generate_pp, tp=layout.generate_tp)
        slot = item * rank_trained(model, as_it_samples)[0]
    widest = 2 * shape.intermediate_size // layout.generate_tp
    if shape.experts is not None:
        inner = shape.experts.inner_size // layout.generate_tp
        widest = max(widest, model.chosen * (max(2 * inner, shape.hidden_size) + inner))
    widest += 2 * shape.hidden_size
    kv_heads = max(1, shape.num_kv_heads // layout.generate_tp)
    layers = math.ceil(shape.num_layers / layout.generate_pp)
    return SamplerBytes(
        # Logits, and their log-probs, in float32.
        fixed=weights // ranks
        + int(slot)
        + PASS_TOKENS * widest * item
        + 2 * 4 * most_rows * shape.padded_vocab_size
        + GRAPH_BYTES,
        token=2 * layers * kv_heads * shape.head_dim * item if system.has_kv_cache else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the completions of a step are sampled: by replicas that share its rows.

    Example: `Sampling(model, Layout(dp=2), work, group, ROLEMESH, 256).seconds(64e9)`.
    """

    model: Model
    layout: Layout
    work: Work
    group: DeviceGroup
    system: System
    """Its kinds of tensors."""
    most_rows: int
    """Rows that are decoded together at most (max_num_seqs)."""

    @property
    def bytes(self) -> SamplerBytes:
        """What a sampler takes on each of its devices."""
        return sampler_bytes(self.model, self.layout, self.system, self.most_rows)

    def seconds(self, budget: float) -> GenerationSeconds:
        """Where the seconds of all completions go.

        Args:
            budget: Bytes of each device that the sampler may take, weights included.

        Raises:
            NoRoomError: The budget does not hold one row.
        """
        sizes = self.bytes
        room = budget - sizes.fixed
        row_bytes = sizes.token * self.work.longest_row
        if room < row_bytes or room < 0:
            raise NoRoomError(math.ceil(row_bytes - room))
        rows = math.ceil(self.work.rows / self.layout.replicas)
        together = self._together(sizes.token, room, rows)
        steps, decoded = _slots(self.work.completions, rows, together)
        return self._seconds(sizes.token, rows, together, steps, decoded)

    def row_ends(self, budget: float, lengths: Sequence[float]) -> list[float]:
        """Seconds after which each row of one replica is finished, by the arithmetic of a plan.

        Args:
            budget: Bytes of each device that the sampler may take, which hold a row at least.
            lengths: Tokens of each completion.
        """
        sizes, rows = self.bytes, len(lengths)
        together = self._together(sizes.token, budget - sizes.fixed, rows)
        ends = _filled(lengths, together)
        steps = math.ceil(max(ends))
        found = self._seconds(sizes.token, rows, together, steps, sum(lengths))
        step_s = (found.total - found.prompts) / steps
        return [found.prompts + step_s * math.ceil(end) for end in ends]

    def _together(self, token_bytes: float, room: float, rows: int) -> int:
        """Rows that a replica decodes together at most."""
        # A row that is on its way holds its prompt and, in the mean, half of its completion. Where
        # all are equally long, as many as fit when they end: more would be put back and begun
        # again.
        work = self.work
        mean_row = max(work.row_tokens, work.prompt_tokens + work.completions.longest / 2)
        fits = math.floor(room / (token_bytes * mean_row)) if token_bytes else self.most_rows
        return max(1, min(rows, self.most_rows, fits))

    def _seconds(
        self, token_bytes: float, rows: int, together: int, steps: int, decoded: float
    ) -> GenerationSeconds:
        model, layout, work, system = self.model, self.layout, self.work, self.system
        group = self.group
        shape, coefficients = model.shape, group.coefficients
        stages, slices = layout.generate_pp, layout.generate_tp
        ranks = stages * slices
        context = work.prompt_tokens + work.completions.mean / 2
        running = decoded / steps
        # Stages work side by side on parts of what runs, each step goes through all of them.
        batch = running / stages
        if system.has_kv_cache:
            computed = batch
            read = sampler_weights(model, system, computed) / ranks
            read += batch * context * token_bytes
        else:
            # Without keys and values a step computes every row from its first token.
            computed = batch * context
            read = sampler_weights(model, system, computed) / ranks
        flops = model.forward_flops(computed, context) / ranks
        reads = stages * max(group.read_s(read), group.compute_s(flops))
        hidden = computed * shape.hidden_size * system.sampled_bytes
        layers = math.ceil(shape.num_layers / stages)
        talk = stages * 2 * layers * group.reduce_s(hidden, slices, 1)
        if stages > 1:
            stride = group.per_machine if ranks > group.per_machine else slices
            talk += stages * group.send_s(hidden, stride, slices)
        host = coefficients.decode_step_s + coefficients.decode_row_s * running
        host += group.layers_s(shape.num_layers, computed * shape.hidden_size / slices)
        host += group.read_s(system.cache_copies * running * context * token_bytes)
        prompts = 0.0
        if system.has_kv_cache:
            # The completions of a prompt share its keys and values, where they are sampled
            # together.
            number = math.ceil(rows / work.samples) if work.shares_prompts else rows
            tokens = number * work.prompt_tokens
            products = group.compute_s(model.forward_flops(tokens, work.prompt_tokens / 2) / ranks)
            passes = max(1, math.ceil(tokens / PASS_TOKENS))
            sent = tokens * shape.hidden_size * system.sampled_bytes / passes
            numbers = tokens * shape.hidden_size / slices / passes
            layer_s = group.layers_s(shape.num_layers, numbers)
            layer_s += 2 * shape.num_layers * group.reduce_s(sent, slices, 1)
            prompts = products + passes * layer_s
        return GenerationSeconds(
            prompts=prompts,
            reads=steps * reads,
            slices=steps * talk,
            host=steps * host,
            steps=steps,
            together=together,
        )


def sampler_weights(model: Model, system: System, rows: float) -> float:
    """Bytes of weights that a decoding step reads on all ranks of a replica together.

    Args:
        model: That samples.
        system: Its kinds of tensors.
        rows: Tokens of the step; with many, nearly all experts of a mixture are chosen by some.
    """
    parameters = model.num_parameters + model.factor_parameters - _looked_up(model)
    left_out = model.read_parameters(math.inf) - model.read_parameters(rows)
    return (parameters - left_out) * system.sampled_bytes


def _looked_up(model: Model) -> int:
    """Parameters of an embedding that is not the head too: a step reads single rows of it."""
    shape = model.shape
    return 0 if shape.is_tied else shape.vocab_size * shape.hidden_size


@lru_cache(maxsize=65536)
def _slots(lengths: Lengths, rows: int, together: int) -> tuple[int, float]:
    """Decoding steps of a replica, and tokens that it decodes in them.

    Each of `together` slots takes the next row when its row ends.
    """
    drawn = lengths.drawn(rows)
    return math.ceil(max(_filled(drawn, together))), sum(drawn)


def _filled(lengths: Sequence[float], together: int) -> list[float]:
    """Decoding steps after which each row is finished, in so many slots."""
    if together >= len(lengths):
        return list(lengths)
    slots = [0.0] * together
    ends = []
    for length in lengths:
        ends.append(slots[0] + length)
        heapq.heapreplace(slots, ends[-1])
    return ends
