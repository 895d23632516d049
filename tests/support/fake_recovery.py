"""Recovery of a fake role: it is attached, keeps cuts beside its process, loads a checkpoint."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message
from support.fake_core import FakeCore, manifest_digest

from rolemesh.rpc.errors import (
    DataLossError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
)
from rolemesh.v1 import cuts_pb2, weights_pb2, worker_pb2


class FakeRecovery(FakeCore):
    """Attach, cuts and LoadCheckpoint."""

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            if self.run_id != request.key.run_id:
                raise PreconditionError("no run is held", reason="NOT_INITIALIZED")
            if json_format.MessageToDict(request.spec) != self.spec:
                raise PreconditionError("the spec is another one", reason="SPEC_CHANGED")
            return worker_pb2.InitializeResult(
                policy_version=self.policy_version,
                num_parameters=1,
                facts={"data.held_out_prompts": str(self.mesh.num_held_out)},
            )

        async for response in self.keyed(
            "Attach", request, context, worker_pb2.AttachResponse, work
        ):
            yield response

    @property
    def _cuts(self) -> dict[int, tuple[float, int]]:
        """State by step; it outlives the service."""
        return self.mesh.cuts.setdefault(self.service, {})

    def _result(self) -> cuts_pb2.CutResult:
        return cuts_pb2.CutResult(policy_version=self.policy_version, num_bytes=8)

    async def SaveCut(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            step, cuts = request.key.step, self._cuts
            # It takes the place of the older of two.
            for old in sorted(known for known in cuts if known != step)[:-1]:
                del cuts[old]
            cuts[step] = (self.weight, self.policy_version)
            return self._result()

        async for response in self.keyed(
            "SaveCut", request, context, cuts_pb2.SaveCutResponse, work
        ):
            yield response

    async def RestoreCut(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            if request.step not in self._cuts:
                raise NotFoundError(f"no cut of step {request.step}", reason="CUT_NOT_FOUND")
            self.weight, self.policy_version = self._cuts[request.step]
            for later in [step for step in self._cuts if step > request.step]:
                if not request.keeps_later:
                    del self._cuts[later]
            return self._result()

        async for response in self.keyed(
            "RestoreCut", request, context, cuts_pb2.RestoreCutResponse, work
        ):
            yield response

    async def ListCuts(self, request: Any, context: Any) -> Any:
        cuts = [cuts_pb2.Cut(step=step, num_bytes=8) for step in sorted(self._cuts)]
        return cuts_pb2.ListCutsResponse(cuts=cuts)

    async def DropCuts(self, request: Any, context: Any) -> Any:
        self._cuts.clear()
        self.mesh.log.append(f"{self.service}.DropCuts")
        return cuts_pb2.DropCutsResponse()

    async def LoadCheckpoint(self, request: Any, context: Any) -> AsyncIterator[Any]:
        def work() -> Message:
            if not (Path(request.directory) / "manifest.json").is_file():
                raise InvalidRequestError("there is no manifest.json", reason="PATH_INVALID")
            try:
                saved = json.loads((Path(request.directory) / "weight.json").read_text())
            except (OSError, ValueError) as error:
                raise DataLossError(str(error), reason="CHECKPOINT_CORRUPT") from error
            self.weight, self.policy_version = saved["weight"], saved["policy_version"]
            return weights_pb2.CheckpointResult(
                policy_version=self.policy_version,
                num_bytes=1,
                manifest_sha256=manifest_digest(Path(request.directory)),
            )

        async for response in self.keyed(
            "LoadCheckpoint", request, context, weights_pb2.LoadCheckpointResponse, work
        ):
            yield response
