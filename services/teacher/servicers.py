"""The teacher: a frozen policy that scores what another one sampled, and says what it prefers.

The service holds it, or asks servers that do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from google.protobuf.message import Message

from rolemesh.engine.layout.payload import MAX_WIDTH
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs import ReferenceSpec, TeacherSpec
from rolemesh.engine.specs.columns import IS_JUDGED
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.rpc.experience.references import names_of
from rolemesh.rpc.notes import bounded
from rolemesh.services.reference.servicers import FrozenPolicyRole
from rolemesh.services.runtime.calls.role import InitializeResult, ProgressCallback, add_servicers
from rolemesh.services.runtime.calls.runtime import Call, Context, Runtime, Share
from rolemesh.services.runtime.servicers.logprobs import LogprobServicer
from rolemesh.services.runtime.servicers.routed_rows import RoutedRows
from rolemesh.services.teacher.served import TeacherAtServers
from rolemesh.v1 import experience_pb2, logprob_pb2


class TeacherRole(FrozenPolicyRole):
    """Holds the policy that the trained one is drawn to, or asks who holds it."""

    name = "teacher"
    spec_class = TeacherSpec

    def __init__(self) -> None:
        super().__init__()
        self.served: TeacherAtServers | None = None
        """Asks servers; None where the service holds the policy itself, or nothing yet."""

    def initialize(
        self,
        spec: ReferenceSpec | TeacherSpec,
        run_seed: int,
        progress: ProgressCallback,
        mesh: RankMesh,
    ) -> InitializeResult:
        """Loads the policy, or checks the servers that hold it."""
        if not isinstance(spec, TeacherSpec) or spec.server is None:
            return super().initialize(spec, run_seed, progress, mesh)
        progress("check the teacher's servers", 0, 1)
        served = TeacherAtServers(spec.server, spec.prompt)
        served.open()
        self.served = served
        return InitializeResult(facts={"teacher.tokens_compared": served.compared})

    def register(self, server: grpc.aio.Server, runtime: Runtime) -> list[str]:
        """Serves log-probs."""
        return add_servicers(server, TeacherServicer(self, runtime))

    def sleep(self) -> int:
        """Moves the weights to host memory, where there are any."""
        return 0 if self.served is not None else super().sleep()

    def wake(self) -> int:
        """Brings the weights back."""
        return 0 if self.served is not None else super().wake()

    def close(self) -> None:
        """Drops the weights, and connections to servers."""
        if self.served is not None:
            self.served.close()
        self.served = None
        super().close()


class TeacherServicer(LogprobServicer):
    """LogprobService over a policy, or over servers that hold it."""

    _role: TeacherRole

    def ComputeLogprobs(
        self, request: logprob_pb2.ComputeLogprobsRequest, context: Context
    ) -> AsyncIterator[logprob_pb2.ComputeLogprobsResponse]:
        """See logprob.proto; servers give log-probs at temperature 1, and no entropy."""
        served = self._role.served
        if served is None:
            return super().ComputeLogprobs(request, context)

        async def work(call: Call) -> Message:
            _check_asked(request)
            columns = served.columns
            if served.may_drop and IS_JUDGED in names_of(request.experience):
                columns = (*columns, IS_JUDGED)
            routed = await RoutedRows.of(self._runtime, request, call)
            if not routed.rows:
                return routed.nothing(request.key, call)
            batch = await self._runtime.pull(request.experience, columns, call, rows=routed.rows)
            asked = routed.scored_of(batch)
            scored = await served.score(
                asked, request.column, request.top_k, call, places=routed.scored
            )
            found = scored.columns
            if routed.is_part:
                found = routed.completed(batch, found, request.column, request.top_k)
            report = call.report(scored.metrics, asked.num_tokens)
            report.notes.extend(bounded(scored.notes))
            share = Share(rows=routed.rows, num_rows=routed.num_rows, counts=True)
            return experience_pb2.ExperienceResult(
                experience=self._runtime.publish(request.key, found, share=share),
                report=report,
                is_part=routed.is_part,
            )

        return self._runtime.keyed(request, logprob_pb2.ComputeLogprobsResponse, work)


def _check_asked(request: logprob_pb2.ComputeLogprobsRequest) -> None:
    """Refuses what servers cannot be asked for; raises InvalidRequestError."""
    wrong = ""
    if not request.column:
        wrong = "column is empty: give the new column a name"
    elif request.temperature != 1.0:
        wrong = (
            f"temperature is {request.temperature}, but the servers of teacher.server give "
            "log-probs at temperature 1 alone: set algorithm.sampling.temperature to 1, or give "
            "teacher.model in place of teacher.server"
        )
    elif not 0 <= request.top_k <= MAX_WIDTH:
        wrong = f"top_k is {request.top_k}: give 0 to {MAX_WIDTH}"
    for field in ("with_entropy", "without_adapter", "as_teacher"):
        if not getattr(request, field):
            continue
        wrong = (
            f"{field} is true, for which the servers of teacher.server cannot be asked: leave it "
            "out, or give teacher.model in place of teacher.server"
        )
    if wrong:
        raise InvalidRequestError(wrong, reason="SPEC_INVALID")
