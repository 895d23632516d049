"""Experience that the suite itself serves to the server under test, and pulls from it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from rolemesh.coordinator.compliance.held_rows import HeldRows
from rolemesh.coordinator.compliance.publisher import Publisher
from rolemesh.coordinator.compliance.samples import Sample
from rolemesh.rpc.channel import SERVER_OPTIONS, MeshChannel, open_channel
from rolemesh.rpc.errors import RolemeshError
from rolemesh.rpc.experience.columns import ColumnData, Columns
from rolemesh.rpc.http.awaited import refuse
from rolemesh.rpc.members.identity import Identity, server_credentials
from rolemesh.v1 import experience_pb2

ROLE = "compliance"
SERVICE_NAME = "rolemesh.v1.ExperienceService"


def columns_of(samples: Sequence[Sample]) -> Columns:
    """Those columns of generation that rewards and models read."""
    return Columns(
        {
            "tokens": ColumnData.sequence(
                [[*one.prompt_tokens, *one.completion_tokens] for one in samples]
            ),
            "prompt_lengths": ColumnData.row([len(one.prompt_tokens) for one in samples], np.int64),
            "prompt_text": ColumnData.text([one.prompt for one in samples]),
            "completion_text": ColumnData.text([one.completion for one in samples]),
            "answer": ColumnData.text([one.answer for one in samples]),
            "metadata": ColumnData.text([one.metadata_json for one in samples]),
        }
    )


class Producer:
    """Serves made-up rows by ExperienceService, and pulls rows of others. Owner: the loop."""

    def __init__(self, identity: Path | None = None) -> None:
        """Prepares.

        Args:
            identity: File of a coordinator's identity; None: in clear.
        """
        self._place = identity
        self.identity = None if identity is None else Identity.read(identity)
        self.address = ""
        self.publisher = Publisher()
        self._held = HeldRows()
        self._torn: set[str] = set()
        self._server: grpc.aio.Server | None = None
        self._channels: dict[str, MeshChannel] = {}

    async def start(self, address: str) -> None:
        """Listens at "host:port"; port 0 takes a free one.

        Raises:
            ValueError: It cannot listen there.
        """
        server = grpc.aio.server(options=SERVER_OPTIONS)
        fetch = grpc.unary_stream_rpc_method_handler(
            self._fetch,
            request_deserializer=experience_pb2.FetchRequest.FromString,
            response_serializer=experience_pb2.FetchResponse.SerializeToString,
        )
        experience = grpc.method_handlers_generic_handler(SERVICE_NAME, {"Fetch": fetch})
        server.add_generic_rpc_handlers((experience, self.publisher.handlers()))
        try:
            port = (
                server.add_insecure_port(address)
                if self._place is None
                else server.add_secure_port(address, server_credentials(self._place))
            )
        except RuntimeError as error:
            raise ValueError(
                f"--serve-address {address} cannot be listened on ({error}): give host:port of "
                "this machine with a free port; port 0 takes any"
            ) from error
        await server.start()
        self._server = server
        self.address = f"{address.rpartition(':')[0]}:{port}"

    async def close(self) -> None:
        """Ends the server and closes the channels."""
        for channel in self._channels.values():
            await channel.close()
        if self._server is not None:
            await self._server.stop(None)

    def serve(
        self,
        samples: Sequence[Sample],
        run_id: str,
        *,
        more: Mapping[str, ColumnData] | None = None,
        without: Sequence[str] = (),
        shards: Sequence[Sequence[int]] = (),
        is_torn: bool = False,
    ) -> experience_pb2.ExperienceRef:
        """Holds rows from now on, and returns their reference.

        Args:
            samples: The rows.
            run_id: Run to which they belong.
            more: Columns to add.
            without: Columns to leave out.
            shards: Rows of each shard, ascending; without shards, one shard has all.
            is_torn: Whether a fetch ends before all bytes of the payload were sent.
        """
        whole = columns_of(samples) | (more or {})
        kept = Columns({name: whole[name] for name in whole if name not in without})
        ref = self._held.refer(kept, run_id, 1, role=ROLE, address=self.address, shards=shards)
        if is_torn:
            self._torn.update(shard.experience_id for shard in ref.groups[0].shards)
        return ref

    def channel(self, address: str) -> MeshChannel:
        """The channel to a holder of rows, opened on first use."""
        if address not in self._channels:
            self._channels[address] = open_channel(address, identity=self.identity)
        return self._channels[address]

    async def _fetch(
        self, request: experience_pb2.FetchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[experience_pb2.FetchResponse]:
        try:
            header, chunks = self._held.fetched(request)
        except RolemeshError as error:
            await refuse(context, error)
        is_torn = request.experience_id in self._torn
        yield experience_pb2.FetchResponse(header=header)
        for chunk in chunks:
            yield experience_pb2.FetchResponse(chunk=chunk[:-1] if is_torn else chunk)
