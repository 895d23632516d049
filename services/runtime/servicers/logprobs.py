"""LogprobService: what a language model gives the tokens of a batch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from google.protobuf.message import Message

from rolemesh.engine.experience import Experience
from rolemesh.engine.layout.payload import MAX_WIDTH
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring import compute_logprobs
from rolemesh.engine.specs.columns import INPUT_COLUMNS
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.rpc.references import row_tokens
from rolemesh.services.runtime.calls.runtime import Call, Context, RoleServicer
from rolemesh.v1 import experience_pb2, logprob_pb2, logprob_pb2_grpc


class PolicyHolder(Protocol):
    """A role that holds a language model."""

    @property
    def policy(self) -> RankModel:
        """The model; raises NOT_INITIALIZED before Initialize."""


class LogprobServicer(RoleServicer[PolicyHolder], logprob_pb2_grpc.LogprobServiceServicer):
    """LogprobService over a policy."""

    def ComputeLogprobs(
        self, request: logprob_pb2.ComputeLogprobsRequest, context: Context
    ) -> AsyncIterator[logprob_pb2.ComputeLogprobsResponse]:
        """See logprob.proto."""

        async def work(call: Call) -> Message:
            if not request.column or request.temperature <= 0:
                raise InvalidRequestError(
                    f"column is {request.column!r} and temperature is {request.temperature}: give "
                    "the new column a name and a temperature above 0",
                    reason="SPEC_INVALID",
                )
            vocab_size = self._role.policy.model.config.get_text_config().vocab_size
            if not 0 <= request.top_k <= min(MAX_WIDTH, vocab_size):
                raise InvalidRequestError(
                    f"top_k is {request.top_k}: give 0 to {min(MAX_WIDTH, vocab_size)}; the "
                    f"vocabulary has {vocab_size} tokens",
                    reason="SPEC_INVALID",
                )
            if request.top_k and request.with_entropy:
                raise InvalidRequestError(
                    f"top_k is {request.top_k} and with_entropy is true: ask for one of the two",
                    reason="SPEC_INVALID",
                )
            if request.without_adapter and not self._role.policy.model.adapter_targets:
                raise InvalidRequestError(
                    "without_adapter is true, but this policy has no adapter: leave it out, or "
                    "give model.adapter",
                    reason="SPEC_INVALID",
                )
            share = self._runtime.share("3D_PROTO", row_tokens(request.experience))
            batch = await self._runtime.pull(
                request.experience, INPUT_COLUMNS, call, rows=share.rows
            )
            scored = await call.compute(
                compute_logprobs,
                self._role.policy,
                batch,
                temperature=request.temperature,
                with_entropy=request.with_entropy,
                without_adapter=request.without_adapter,
                top_k=request.top_k,
                progress=call.progress,
            )
            columns = {
                request.column if name == "logprobs" else f"{request.column}_{name}": column
                for name, column in scored.columns.items()
            }
            return experience_pb2.ExperienceResult(
                experience=self._runtime.publish(request.key, Experience(columns), share=share),
                report=call.report({}, batch.num_tokens if share.counts else 0),
            )

        return self._runtime.keyed(request, logprob_pb2.ComputeLogprobsResponse, work)
