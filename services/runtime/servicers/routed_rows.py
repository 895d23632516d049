"""The rows of a batch that one of several teachers scores, and the columns that come of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch

from rolemesh.engine.data.teachers.routes import RowRoute
from rolemesh.engine.experience import Column, ColumnKind, Experience, offsets_of
from rolemesh.engine.models.scoring import completion_lengths
from rolemesh.engine.specs import LEFT
from rolemesh.engine.specs.columns import weights_column
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.services.runtime.calls.runtime import Call, Runtime
from rolemesh.v1 import experience_pb2, logprob_pb2, operation_pb2


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Rows that a teacher answers for. Those of weight 0 it does not score: their numbers are 0.

    Shape letters: R of these rows, S of them that are scored.
    """

    rows: Sequence[int]
    """Of the batch, ascending."""
    weights_R: torch.Tensor
    """float32, what the teacher counts for."""
    num_rows: int
    """Of the batch."""
    is_part: bool = False
    """Whether others may answer for the rest."""
    has_weights: bool = False
    """Whether a column with the weights is wanted."""

    @classmethod
    async def of(
        cls, runtime: Runtime, request: logprob_pb2.ComputeLogprobsRequest, call: Call
    ) -> Self:
        """Those that the request's route does not leave to others; without one all.

        Raises:
            InvalidRequestError: SPEC_INVALID: the route cannot be.
            DataInvalidError: It says nothing of a row.
        """
        number = request.experience.num_rows
        if not request.HasField("route"):
            return cls(range(number), torch.ones(number), number)
        route = _route(request.route)
        metadata = None
        if route.columns:
            columns = await runtime.pull(request.experience, route.columns, call)
            metadata = columns["metadata"].strings()
        found = route.of(metadata, number)
        return cls(
            rows=list(found),
            weights_R=torch.tensor(list(found.values()), dtype=torch.float32),
            num_rows=number,
            is_part=True,
            has_weights=request.route.with_weights,
        )

    def select(self, rows: Sequence[int]) -> Self:
        """Some of them, by their places in the batch."""
        place_of = {row: place for place, row in enumerate(self.rows)}
        places = torch.tensor([place_of[row] for row in rows], dtype=torch.int64)
        return replace(self, rows=rows, weights_R=self.weights_R[places])

    @property
    def scored(self) -> list[int]:
        """Those that are scored."""
        return [row for row, weight in zip(self.rows, self.weights_R, strict=True) if weight > 0]

    def scored_of(self, batch: Experience) -> Experience:
        """Those that are scored, of a batch of these rows."""
        return batch.select((self.weights_R > 0).nonzero().flatten())

    def completed(
        self, batch: Experience, scored: Experience, column: str, top_k: int
    ) -> Experience:
        """The columns of all these rows, from those of the rows that were scored.

        Args:
            batch: These rows, with tokens and prompt_lengths.
            scored: The columns of `scored`, by their names in the result.
            column: Name of the log-probs.
            top_k: Tokens at each place that are told apart.
        """
        lengths_R = completion_lengths(batch)
        is_scored_N = (self.weights_R > 0).repeat_interleave(lengths_R)
        columns = {}
        for name, found in scored.columns.items():
            if found.kind is not ColumnKind.COMPLETION:
                columns[name] = found
                continue
            # Without a scored row the type of what was found is not known.
            is_ids = name == f"{column}_top_ids"
            width = (top_k,) if name in (f"{column}_top_ids", f"{column}_top") else ()
            values = torch.zeros(
                (len(is_scored_N), *width), dtype=torch.int32 if is_ids else torch.float32
            )
            values[is_scored_N] = found.values.view(-1, *width).to(values.dtype)
            columns[name] = Column(ColumnKind.COMPLETION, values, offsets_of(lengths_R))
        if self.has_weights:
            columns[weights_column(column)] = Column(ColumnKind.ROW, self.weights_R)
        return Experience(columns)

    def nothing(
        self, key: operation_pb2.OperationKey, call: Call
    ) -> experience_pb2.ExperienceResult:
        """The answer of a teacher that no row goes to."""
        ref = experience_pb2.ExperienceRef(run_id=key.run_id, step=key.step, num_rows=self.num_rows)
        return experience_pb2.ExperienceResult(
            experience=ref, report=call.report({}, 0), is_part=True
        )


def _route(message: logprob_pb2.RowRoute) -> RowRoute:
    others: float | Literal["left"] | None = None
    if message.HasField("others_weight"):
        others = message.others_weight
    elif message.HasField("others_left") and message.others_left:
        others = LEFT
    weights = dict(message.weights)
    given = [*weights.values(), *([others] if isinstance(others, float) else [])]
    if wrong := [weight for weight in given if not 0 <= weight <= 1]:
        raise InvalidRequestError(
            f"route has the weight {wrong[0]}: give 0 to 1", reason="SPEC_INVALID"
        )
    if both := sorted({*weights} & {*message.left}):
        raise InvalidRequestError(
            f"route has the value {both[0]!r} both in weights and in left: give one of the two",
            reason="SPEC_INVALID",
        )
    return RowRoute(message.field, weights, frozenset(message.left), others)
