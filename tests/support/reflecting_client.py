"""A client that knows nothing of rolemesh but an address, as grpcurl does.

It asks the server's reflection for services, builds their messages from what it is told, and makes
the calls that it is given as JSON.

    python reflecting_client.py HOST:PORT '[["rolemesh.v1.WorkerService", "GetCapabilities", {}]]'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

sys.modules["rolemesh"] = None  # type: ignore[assignment]

TIMEOUT_S = 60.0


class ReflectingClient:
    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = reflection_pb2_grpc.ServerReflectionStub(self._channel)
        self._pool = descriptor_pool.DescriptorPool()
        self._added: set[str] = set()

    def services(self) -> dict[str, list[str]]:
        """Methods by service, all of their messages built."""
        answer = self._ask(list_services="")
        found = {}
        for listed in answer.list_services_response.service:
            self._learn(self._ask(file_containing_symbol=listed.name))
            service = self._pool.FindServiceByName(listed.name)
            for method in service.methods:
                message_factory.GetMessageClass(method.input_type)()
                message_factory.GetMessageClass(method.output_type)()
            found[listed.name] = [method.name for method in service.methods]
        return found

    def call(self, service: str, method: str, request: Any) -> list[Any]:
        """All answers of a call, as JSON."""
        known = self._pool.FindServiceByName(service).FindMethodByName(method)
        sent, came = (
            message_factory.GetMessageClass(one) for one in (known.input_type, known.output_type)
        )
        answers = self._channel.unary_stream(
            f"/{service}/{method}",
            request_serializer=sent.SerializeToString,
            response_deserializer=came.FromString,
        )(json_format.ParseDict(request, sent()), timeout=TIMEOUT_S)
        return [json_format.MessageToDict(answer) for answer in answers]

    def _ask(self, **request: str) -> Any:
        requests = iter([reflection_pb2.ServerReflectionRequest(**request)])
        return next(self._stub.ServerReflectionInfo(requests, timeout=TIMEOUT_S))

    def _learn(self, answer: Any) -> None:
        files = {file.name: file for file in _files(answer)}

        def add(name: str) -> None:
            if name in self._added:
                return
            if name not in files:
                files.update({one.name: one for one in _files(self._ask(file_by_filename=name))})
            for dependency in files[name].dependency:
                add(dependency)
            self._pool.Add(files[name])
            self._added.add(name)

        for name in list(files):
            add(name)


def _files(answer: Any) -> Iterator[descriptor_pb2.FileDescriptorProto]:
    for data in answer.file_descriptor_response.file_descriptor_proto:
        yield descriptor_pb2.FileDescriptorProto.FromString(data)


if __name__ == "__main__":
    client = ReflectingClient(sys.argv[1])
    told: dict[str, Any] = {"services": client.services()}
    told["answers"] = [client.call(*call) for call in json.loads(sys.argv[2])]
    print(json.dumps(told))
