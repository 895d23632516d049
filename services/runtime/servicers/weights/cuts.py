"""CutService over a trainer: cuts of its state in shared memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from google.protobuf.message import Message

from rolemesh.engine.train.cuts.format import CutHeader
from rolemesh.engine.train.cuts.slots import RestoredCut, whole_cuts
from rolemesh.engine.transport.slots.slot_files import SlotOwner
from rolemesh.engine.transport.slots.slots import remove_slots
from rolemesh.services.runtime.calls.runtime import Call, Context, RoleServicer
from rolemesh.services.runtime.server.operations import identity_of
from rolemesh.services.runtime.servicers.model_role import ModelRole
from rolemesh.services.runtime.servicers.weights.cut_checkpoints import cuts_written, owner_of_cuts
from rolemesh.v1 import cuts_pb2, cuts_pb2_grpc, operation_pb2


class CutServicer(RoleServicer[ModelRole], cuts_pb2_grpc.CutServiceServicer):
    """CutService over a trainer."""

    def SaveCut(
        self, request: cuts_pb2.SaveCutRequest, context: Context
    ) -> AsyncIterator[cuts_pb2.SaveCutResponse]:
        """See cuts.proto."""

        async def work(call: Call) -> Message:
            role, key = self._role, request.key

            def save() -> tuple[int, float]:
                slots = role.cut_slots(self._owner(key.run_id))
                slots.settle()
                waited_s = slots.waited_s
                saved = role.trainer.save_cut(slots, key.step, role.extra_state, call.progress)
                return saved, waited_s

            num_bytes, waited_s = await call.compute(save)
            result = self._result(num_bytes, call)
            result.waited_seconds = waited_s
            return result

        return self._runtime.keyed(request, cuts_pb2.SaveCutResponse, work)

    def RestoreCut(
        self, request: cuts_pb2.RestoreCutRequest, context: Context
    ) -> AsyncIterator[cuts_pb2.RestoreCutResponse]:
        """See cuts.proto."""

        async def work(call: Call) -> Message:
            role, key = self._role, request.key

            def restore() -> RestoredCut:
                slots = role.cut_slots(self._owner(key.run_id))
                restored = role.trainer.restore_cut(
                    slots, request.step, keeps_later=request.keeps_later
                )
                role.extra_state = restored.extra
                role.weights_replaced()
                return restored

            return self._result((await call.compute(restore)).num_bytes, call)

        return self._runtime.keyed(request, cuts_pb2.RestoreCutResponse, work)

    async def ListCuts(
        self, request: cuts_pb2.ListCutsRequest, context: Context
    ) -> cuts_pb2.ListCutsResponse:
        """See cuts.proto."""
        _check_run(request.run_id)
        runtime = self._runtime
        layout = runtime.process.config.layout.layout().flag()

        def find() -> list[CutHeader]:
            self._role.settle_cut()
            return whole_cuts(self._owner(request.run_id), layout)

        own = await runtime.compute.run(find)
        answer = cuts_pb2.ListCutsResponse(
            cuts=[
                cuts_pb2.Cut(
                    step=cut.step, policy_version=cut.policy_version, num_bytes=cut.num_bytes
                )
                for cut in own
            ]
        )
        return _of_all_ranks([answer, *await runtime.tell_others(request)])

    async def DropCuts(
        self, request: cuts_pb2.DropCutsRequest, context: Context
    ) -> cuts_pb2.DropCutsResponse:
        """See cuts.proto."""
        runtime = self._runtime
        runtime.ledger.check_speaker(request.run_id, request.fencing_epoch)
        runtime.hold.heed(request.run_id, request.fencing_epoch)

        def drop() -> None:
            if runtime.hold.run_id == request.run_id:
                self._role.close_cut_slots()
            remove_slots(request.run_id, self._role.name)

        # A checkpoint that the coordinator still waits for is not lost with its cut.
        await cuts_written(runtime)
        await runtime.compute.run(drop)
        await runtime.tell_others(request)
        return cuts_pb2.DropCutsResponse()

    def _owner(self, run_id: str) -> SlotOwner:
        return owner_of_cuts(self._role, self._runtime, run_id)

    def _result(self, num_bytes: int, call: Call) -> cuts_pb2.CutResult:
        return cuts_pb2.CutResult(
            policy_version=self._role.trainer.policy_version,
            num_bytes=num_bytes,
            report=call.report({}, 0),
        )


def _check_run(run_id: str) -> None:
    """Refuses a run_id that no key could have.

    Raises:
        InvalidRequestError: KEY_INVALID; names the field.
    """
    identity_of(operation_pb2.OperationKey(run_id=run_id, fencing_epoch=1, operation="cuts"))


def _of_all_ranks(answers: Sequence[cuts_pb2.ListCutsResponse]) -> cuts_pb2.ListCutsResponse:
    """Cuts that all ranks have at one version, with the bytes of all."""
    joined = cuts_pb2.ListCutsResponse()
    found = [{(cut.step, cut.policy_version): cut for cut in answer.cuts} for answer in answers]
    for place in sorted(set.intersection(*(set(cuts) for cuts in found))):
        cut = joined.cuts.add()
        cut.CopyFrom(found[0][place])
        cut.num_bytes = sum(cuts[place].num_bytes for cuts in found)
    return joined
