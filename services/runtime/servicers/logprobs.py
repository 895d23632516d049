"""LogprobService: what a language model gives the tokens of a batch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from google.protobuf.message import Message

from rolemesh.engine.data.rendering.rendering import ChatTokenizer
from rolemesh.engine.data.teachers.prompts import TeacherPrompts
from rolemesh.engine.experience import Experience
from rolemesh.engine.layout.payload import MAX_WIDTH
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.models.rank_model import RankModel
from rolemesh.engine.models.scoring import compute_logprobs
from rolemesh.engine.specs import TeacherPromptSpec
from rolemesh.engine.specs.columns import ROUTES
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.rpc.experience.references import names_of, row_tokens
from rolemesh.services.runtime.calls.runtime import Call, Context, RoleServicer
from rolemesh.services.runtime.servicers.model_inputs import model_inputs
from rolemesh.services.runtime.servicers.routed_rows import RoutedRows
from rolemesh.v1 import experience_pb2, logprob_pb2, logprob_pb2_grpc


@dataclass(frozen=True, slots=True)
class Teaching:
    """How a policy scores as a teacher."""

    prompts: TeacherPrompts | None = None
    """What it is told in the place of the prompt that the student saw; None: that one."""
    weights: Callable[[], AbstractContextManager[None]] = nullcontext
    """Has it compute with other weights meanwhile; entered on the compute thread."""


STUDENT = Teaching()
"""How it scores otherwise: as it is, behind the prompts of the rows."""


class PolicyHolder(Protocol):
    """A role that holds a language model."""

    replays_routes: bool
    """Whether it scores rows by the experts that they were sampled with."""

    @property
    def policy(self) -> RankModel:
        """The model; raises NOT_INITIALIZED before Initialize."""

    def teaching(self, as_teacher: bool) -> Teaching:
        """How it scores where it is asked as a teacher, or not; raises SPEC_INVALID if it is none.

        A service of the role teacher is one whether it is asked so or not.
        """


def load_teacher_prompts(
    spec: TeacherPromptSpec, tokenizer: ChatTokenizer, model: CausalLm
) -> TeacherPrompts:
    """What a model is told as a teacher; raises DataInvalidError as `TeacherPrompts`.

    Args:
        spec: Of the role.
        tokenizer: Of the model.
        model: Whose longest sequence counts.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return TeacherPrompts(tokenizer, spec, longest)


def _columns(role: PolicyHolder, request: logprob_pb2.ComputeLogprobsRequest) -> tuple[str, ...]:
    """What a policy reads of rows; its base, or as a teacher it, chooses experts by itself."""
    is_other = request.without_adapter or request.as_teacher
    columns = model_inputs(request.experience)
    if role.replays_routes and not is_other and ROUTES in names_of(request.experience):
        return (*columns, ROUTES)
    return columns


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
            teaching = self._role.teaching(request.as_teacher)
            if request.without_adapter and request.as_teacher:
                raise InvalidRequestError(
                    "without_adapter and as_teacher are true: ask for one of the two",
                    reason="SPEC_INVALID",
                )
            prompts = teaching.prompts
            every = await RoutedRows.of(self._runtime, request, call)
            if not every.rows:
                return every.nothing(request.key, call)
            lengths = row_tokens(request.experience)
            share = self._runtime.share("3D_PROTO", [lengths[row] for row in every.rows])
            share = share.among(every.rows, every.num_rows)
            batch = await self._runtime.pull(
                request.experience,
                _columns(self._role, request) if prompts is None else prompts.columns,
                call,
                rows=share.rows,
            )
            routed = every.select(share.rows)
            asked = routed.scored_of(batch)

            def score() -> Experience:
                retold = None if prompts is None else partial(prompts.of, places=routed.scored)
                with teaching.weights():
                    return compute_logprobs(
                        self._role.policy,
                        asked,
                        temperature=request.temperature,
                        with_entropy=request.with_entropy,
                        without_adapter=request.without_adapter,
                        top_k=request.top_k,
                        retold=retold,
                        progress=call.progress,
                    )

            scored = await call.compute(score)
            columns = Experience(
                {
                    request.column if name == "logprobs" else f"{request.column}_{name}": column
                    for name, column in scored.columns.items()
                }
            )
            if routed.is_part and share.counts:
                columns = routed.completed(batch, columns, request.column, request.top_k)
            return experience_pb2.ExperienceResult(
                experience=self._runtime.publish(request.key, columns, share=share),
                report=call.report({}, asked.num_tokens if share.counts else 0),
                is_part=routed.is_part,
            )

        return self._runtime.keyed(request, logprob_pb2.ComputeLogprobsResponse, work)
