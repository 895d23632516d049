"""What calls of Tinker's protocol ask for and get, whichever way it travels.

`json_forms` and `proto_forms` make these of bodies, and bodies of these. What a client did wrong
is a `WireError`; what no single body shows (an unknown model, a call out of order) is not known
here. Log-probs are natural logs; NaN and infinity pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

MOST_DATA = 2**16
"""Data of one call. Clients send chunks of 1,024."""

MOST_TOKENS = 2**20
"""Tokens of one datum or prompt."""

MOST_DENSE_BYTES = 2**30
"""All tensors of one call, dense: a sparse one of few bytes may say that it has any shape."""

EMPTY_LOGPROB = -99999.0
"""Log-prob of a cell of `TopkLogprobs` that is empty; its token is 0."""

REDUCTIONS = frozenset({"mean", "sum", "min", "max", "slack", "unique", "hash_unordered"})
"""How clients join a metric of several chunks; they drop a metric with another reduction."""

_SHOWN = 80
"""Characters of a wrong value that its message repeats."""


class WireError(ValueError):
    """What a client did wrong, as a text for it: field, value and remedy."""

    def __init__(self, name: str, value: object, remedy: str) -> None:
        shown = value if isinstance(value, str) else repr(value)
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}..."
        super().__init__(f"{name}: {shown}: {remedy}")


def chunk_refused(name: str, kind: str) -> WireError:
    """The error for a chunk of another kind than encoded_text, e.g. a picture."""
    return WireError(
        name, kind, "this server trains and samples text alone: send chunks of encoded_text"
    )


class DenseRoom:
    """Bytes that the dense tensors of one call may still take. Owned by the reader of the call."""

    def __init__(self, most_bytes: int = MOST_DENSE_BYTES) -> None:
        self._left = most_bytes

    def take(self, name: str, shape: Sequence[int], item_bytes: int) -> None:
        """Count a tensor before it is made.

        Raises:
            WireError: a size is negative, or the tensors of the call are too large together.
        """
        if any(size < 0 for size in shape) or len(shape) > 32:
            raise WireError(f"{name}.shape", list(shape), "give up to 32 sizes of 0 or more")
        # A size of 0 would let the others be of any size, which numpy refuses.
        self._left -= math.prod(max(size, 1) for size in shape) * item_bytes
        if self._left < 0:
            raise WireError(
                f"{name}.shape",
                list(shape),
                f"the tensors of one call take at most {MOST_DENSE_BYTES} bytes when dense: "
                "send fewer data in a call, or fewer columns",
            )


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor that came dense, or as the listed cells of a matrix.

    Example: values [5, 6], crow_indices [0, 1, 2] and col_indices [1, 0] of shape [2, 2], filled
    with 0, have the dense values [[0, 5], [6, 0]].
    """

    values: npt.NDArray[Any]
    """float32 or int64, of any shape; dense."""
    crow_indices: Ints | None = None
    """int64 [R + 1]; None: it came dense. Kept for an answer that lists the same cells."""
    col_indices: Ints | None = None
    """int64 [N], columns of the listed cells."""

    @classmethod
    def of_dense(
        cls, name: str, values: npt.NDArray[Any], shape: Sequence[int], room: DenseRoom
    ) -> Tensor:
        """Of all elements.

        Args:
            name: The field, for messages.
            values: float32 or int64 [n], row-major.
            shape: Its product is n. Empty: one dimension.
            room: What the call may still take.
        """
        shape = list(shape) or [values.size]
        room.take(name, shape, values.itemsize)
        if math.prod(shape) != values.size:
            raise WireError(
                f"{name}.shape", shape, f"it has {values.size} elements: let them agree"
            )
        return cls(values.reshape(shape))

    @classmethod
    def of_csr(
        cls,
        name: str,
        values: npt.NDArray[Any],
        crow_indices: Ints,
        col_indices: Ints,
        shape: Sequence[int],
        room: DenseRoom,
        fill: int = 0,
    ) -> Tensor:
        """Of listed cells; all others are `fill`.

        Args:
            name: The field, for messages.
            values: float32 or int64 [N].
            crow_indices: int64 [R + 1], ascending from 0 to N.
            col_indices: int64 [N], ascending inside each row, each below the number of columns.
            shape: [R, columns].
            room: What the call may still take.
            fill: What cells hold that are not listed.
        """
        if len(shape) != 2:
            raise WireError(f"{name}.shape", list(shape), "a sparse tensor has two dimensions")
        room.take(name, shape, values.itemsize)
        rows, columns = shape
        listed = values.size
        ends = crow_indices[[0, -1]].tolist() if crow_indices.size else []
        # Compared and not subtracted, which could overflow.
        is_falling = crow_indices[1:] < crow_indices[:-1]
        if crow_indices.size != rows + 1 or ends != [0, listed] or is_falling.any():
            raise WireError(
                f"{name}.crow_indices",
                crow_indices.tolist()[:16],
                f"give {rows + 1} numbers that ascend from 0 to {listed}, the number of values",
            )
        if col_indices.size != listed:
            raise WireError(
                f"{name}.col_indices", f"{col_indices.size} numbers", f"give {listed}, one a value"
            )
        row_of = np.repeat(np.arange(rows), np.diff(crow_indices))
        is_ascending = (col_indices[1:] > col_indices[:-1]) | (row_of[1:] > row_of[:-1])
        is_inside = (col_indices >= 0) & (col_indices < columns)
        if not (is_ascending.all() and is_inside.all()):
            raise WireError(
                f"{name}.col_indices",
                col_indices.tolist()[:16],
                f"give numbers from 0 to {columns - 1} that ascend inside each row",
            )
        dense = np.full((rows, columns), fill, values.dtype)
        dense[row_of, col_indices] = values
        return cls(dense, crow_indices, col_indices)

    def listed(self) -> npt.NDArray[Any]:
        """The values that travel: [N] of the listed cells, or all of them in one dimension."""
        if self.crow_indices is None or self.col_indices is None:
            return self.values.reshape(-1)
        rows = np.repeat(np.arange(len(self.values)), np.diff(self.crow_indices))
        cells: npt.NDArray[Any] = self.values[rows, self.col_indices]
        return cells


@dataclass(frozen=True, slots=True)
class ProvenanceSpan:
    """A run of a datum's tokens that came from one sampled sequence."""

    sequence_id: str
    """The sequence's id, as its sampling was answered."""
    offset: int
    """Where the run begins, in tokens: in the prompt, or among the sampled ones."""
    length: int
    """Tokens of the run."""
    is_sampled: bool
    """Whether they were sampled; else they were its prompt's."""


def make_span(
    name: str, sequence_id: str, offset: int, length: int, *, is_sampled: bool
) -> ProvenanceSpan:
    """A span that is possible, or a WireError that names the field."""
    if not sequence_id:
        raise WireError(f"{name}.sequence_id", "empty", "give the id of a sampled sequence")
    for field_name, number in (("offset", offset), ("length", length)):
        if number < 0:
            raise WireError(f"{name}.{field_name}", number, "give 0 or more tokens")
    return ProvenanceSpan(sequence_id, offset, length, is_sampled)


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """One sequence to learn from, of T input tokens."""

    tokens: Ints
    """int64 [T], T >= 1, none negative."""
    inputs: Mapping[str, npt.NDArray[Any]]
    """What the loss takes for each token, by name: float32 or int64, mostly [T] or [T, K]. Whether
    a loss is served with these is not decided here."""
    input_spans: tuple[ProvenanceSpan, ...] = ()
    """Where the input tokens came from: lengths add up to T. Empty: not said."""
    target_spans: tuple[ProvenanceSpan, ...] = ()
    """The same for the rows of `inputs["target_tokens"]`."""


def make_datum(
    name: str,
    tokens: Ints,
    inputs: Mapping[str, npt.NDArray[Any]],
    input_spans: tuple[ProvenanceSpan, ...] = (),
    target_spans: tuple[ProvenanceSpan, ...] = (),
) -> Datum:
    """A datum whose spans cover what they are about; `name` is its field, for messages."""
    targets = inputs.get("target_tokens")
    num_targets = len(targets) if targets is not None and targets.ndim else len(tokens)
    for field_name, spans, num_tokens in (
        ("model_input_spans", input_spans, len(tokens)),
        ("loss_fn_input_spans", target_spans, num_targets),
    ):
        covered = sum(span.length for span in spans)
        if spans and covered != num_tokens:
            raise WireError(
                f"{name}.{field_name}", f"{covered} tokens", f"let them cover all {num_tokens}"
            )
    return Datum(tokens, inputs, input_spans, target_spans)


def join_chunks(name: str, chunks: Iterator[Ints]) -> Ints:
    """Tokens of chunks, int64 [n] each, one behind the other: int64 [T].

    Raises:
        WireError: no tokens, more than `MOST_TOKENS`, or a negative id.
    """
    parts: list[Ints] = []
    num_tokens = 0
    for chunk in chunks:
        parts.append(chunk)
        num_tokens += chunk.size
        if num_tokens > MOST_TOKENS:
            raise WireError(
                name, f"more than {MOST_TOKENS} tokens", "cut the text into several shorter ones"
            )
    if not num_tokens:
        raise WireError(name, "no tokens", "give at least one")
    tokens = np.concatenate(parts)
    if tokens.min() < 0:
        raise WireError(name, int(tokens.min()), "give ids of the vocabulary, which are 0 or more")
    return tokens


def check_num_data(num_data: int) -> None:
    """Refuse a call of no data, or of more than `MOST_DATA`."""
    if not 1 <= num_data <= MOST_DATA:
        raise WireError("data", f"{num_data} data", f"send 1 to {MOST_DATA} in a call")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradientCall:
    """Asks for the loss of some data, and for its gradient unless forward_only."""

    model_id: str
    seq_id: int
    """Place among the calls of its model, from 1. 0: none was given."""
    data: tuple[Datum, ...]
    loss: str
    """Name of the loss, e.g. "cross_entropy"."""
    config: Mapping[str, float | str]
    """Settings of the loss by name."""
    forward_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn."""

    max_tokens: int | None = None
    """>= 1. None: as many as the model takes."""
    seed: int | None = None
    """0 to 2**64 - 1. None: any."""
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    """Texts, or tokens, that end a sample. None: the end of a text does. Empty: nothing does, not
    even that."""
    temperature: float = 1.0
    """>= 0."""
    top_k: int = -1
    """>= 1; -1: all tokens."""
    top_p: float = 1.0
    """Above 0, at most 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleCall:
    """Asks for samples behind one prompt of P tokens.

    The model is that of `sampling_session_id`; without one, that of `model_path`, else
    `base_model` as it is.
    """

    prompt: Ints
    """int64 [P], P >= 1."""
    params: SamplingParams
    num_samples: int = 1
    sampling_session_id: str | None = None
    seq_id: int | None = None
    """Number of the call in its sampling session: above 2**53 sometimes, in no order. None only
    without a session."""
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool = False
    """Whether the log-probs of the prompt are wanted."""
    topk_prompt_logprobs: int = 0
    """How many of the likeliest tokens are wanted at each place of the prompt."""
    topk_sample_logprobs: int = 0
    """The same for sampled tokens."""
    target_prompt_logprobs: Tensor | None = None
    """int64 [P - 1, K]: tokens whose log-probs are wanted at the place of prompt token i + 1; -1
    asks for nothing."""
    prompt_alt_tokens_k: int = 0
    """How many draws are wanted at each place of the prompt but the first."""
    prompt_logprobs_last_n: int | None = None
    """Only the last n tokens of the prompt are scored, 1 <= n < P. None: all."""
    record_stability_info: bool = False
    """Whether a later call with the loss stable_reinforce will name the samples."""


@dataclass(frozen=True, slots=True, eq=False)
class GradientResult:
    """What became of a `GradientCall`."""

    logprobs: Sequence[Floats]
    """float32 [T] or [T, K] for each datum: log-probs of its target tokens."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Each named NAME:REDUCTION, e.g. "loss:sum"; the reduction is one of `REDUCTIONS`."""

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name.count(":") != 1 or name.split(":")[1] not in REDUCTIONS:
                raise ValueError(
                    f"metrics: {name!r}: name it NAME:REDUCTION with one of {sorted(REDUCTIONS)}"
                )


@dataclass(frozen=True, slots=True, eq=False)
class TopkLogprobs:
    """The K likeliest tokens at each of L places, the likeliest first.

    A cell that is empty has token 0 and `EMPTY_LOGPROB`.
    """

    token_ids: npt.NDArray[Any]
    """int32 or int64 [L, K]."""
    logprobs: Floats
    """float32 [L, K]."""


@dataclass(frozen=True, slots=True, eq=False)
class SampledSequence:
    """One sample of S tokens."""

    tokens: npt.NDArray[Any]
    """int32 or int64 [S]."""
    logprobs: Floats | None
    """float32 [S]. None: not asked for."""
    is_stopped: bool
    """Whether it ends at a stop; else at the most tokens that were allowed."""
    topk: TopkLogprobs | None = None
    """[S, K]. None: not asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleResult:
    """What became of a `SampleCall` behind P tokens. None: not asked for."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Floats | None = None
    """float32 [P]; NaN where there is none, as for the first token."""
    topk_prompt_logprobs: TopkLogprobs | None = None
    """[P, K]; row 0 is empty."""
    target_prompt_logprobs: Tensor | None = None
    """float32 [P - 1, K], cells listed as in the call; 0 where it had -1."""
    prompt_alt_tokens: TopkLogprobs | None = None
    """[P - 1, K]: draws, in no order."""
    prompt_cache_hit_tokens: int = 0
    """Tokens of the prompt that were not computed anew."""
