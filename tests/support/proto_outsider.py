"""Servers written from protos alone: `python proto_outsider.py IMAGE KIND FAULT`.

Knows nothing of rolemesh but the descriptors in IMAGE, a FileDescriptorSet. KIND is "reward" (of
rolemesh.v1) or "inference" (of the open inference protocol); FAULT is what it gets wrong, or "".
The reward of a trajectory is the length of its completion in characters.
"""

from __future__ import annotations

import struct
import sys
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def message_classes(image: Path) -> dict[str, Any]:
    files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes())
    return dict(
        message_factory.GetMessages(list(files.file), pool=descriptor_pool.DescriptorPool())
    )


class RewardServer:
    def __init__(self, classes: dict[str, Any], fault: str) -> None:
        self.request_class = classes["rolemesh.v1.ComputeRewardRequest"]
        self.response_class = classes["rolemesh.v1.ComputeRewardResponse"]
        self.fault = fault
        self.calls = 0
        self.keys: list[str] = []

    def compute(self, request: Any, context: Any) -> Any:
        self.calls += 1
        key = request.key
        self.keys.append(f"{key.run_id}/{key.fencing_epoch}/{key.step}/{key.operation}")
        fault, rows = self.fault, request.trajectories.trajectories
        if fault == "flapping" and self.calls % 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "back in a moment")
        if fault == "refuses":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not like this")
        if fault == "raises":
            raise KeyError("a bug of the server")
        if fault == "slow":
            time.sleep(30)
        if fault == "keys" and "key" in rows[0].completion:
            yield self.rewards([float(len(set(self.keys)))])
            return
        yield self.response_class(progress={"stage": "judge", "done": 1, "total": 2})
        rewards = [float(len(row.completion)) for row in rows]
        if fault == "token" and ("authorization", "Bearer secret") not in tuple(
            (item.key, item.value) for item in context.invocation_metadata()
        ):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
        if fault == "short":
            rewards.pop()
        elif fault == "nan":
            rewards[0] = float("nan")
        elif fault == "huge":
            rewards *= 1_000_000
        elif fault == "silent":
            return
        elif fault == "reference":
            yield self.response_class(result={})
            return
        elif fault == "empty":
            yield self.response_class()
            return
        metrics = {"odd name": 1.0} if fault == "metric" else {"length": rewards[0]}
        yield self.rewards(rewards, metrics)
        if fault == "twice":
            yield self.rewards(rewards)

    def rewards(self, rewards: list[float], metrics: dict[str, float] | None = None) -> Any:
        return self.response_class(rewards={"rewards": rewards, "metrics": metrics or {}})

    def handler(self) -> Any:
        def serialize(message: Any) -> bytes:
            return b"\xff" * 9 if self.fault == "garbage" else bytes(message.SerializeToString())

        method = grpc.unary_stream_rpc_method_handler(
            self.compute, self.request_class.FromString, serialize
        )
        return grpc.method_handlers_generic_handler(
            "rolemesh.v1.RewardService", {"ComputeReward": method}
        )


class InferenceServer:
    def __init__(self, classes: dict[str, Any], fault: str) -> None:
        self.request_class = classes["inference.ModelInferRequest"]
        self.response_class = classes["inference.ModelInferResponse"]
        self.fault = fault

    def infer(self, request: Any, context: Any) -> Any:
        texts = {
            tensor.name: [text.decode() for text in tensor.contents.bytes_contents]
            for tensor in request.inputs
        }
        shapes = {tuple(tensor.shape) for tensor in request.inputs}
        count = len(texts["completion"])
        wanted = (count, 1) if self.fault == "column" else (count,)
        if request.model_name != "judge" or shapes != {wanted}:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{request.model_name} {shapes}")
        rewards = [float(len(text)) for text in texts["completion"]]
        response = self.response_class(model_name="judge")
        other = response.outputs.add(name="other", datatype="INT64", shape=[1])
        output = response.outputs.add(name="reward", datatype="FP32", shape=wanted)
        if self.fault == "raw":
            response.raw_output_contents.extend(
                (struct.pack("<q", 7), struct.pack(f"<{count}f", *rewards))
            )
        elif self.fault == "raw_cut":
            response.raw_output_contents.extend((struct.pack("<q", 7), b"\x00" * 5))
        elif self.fault == "raw_absent":
            response.raw_output_contents.append(struct.pack("<q", 7))
        else:
            other.contents.int64_contents.append(7)
            output.contents.fp32_contents.extend(rewards)
        if self.fault == "shape":
            output.shape[:] = [count, 2]
        if self.fault == "text":
            output.datatype = "BYTES"
        if self.fault == "unnamed":
            output.name = "score"
        if self.fault == "nan":
            output.contents.fp32_contents[0] = float("nan")
        return response

    def handler(self) -> Any:
        method = grpc.unary_unary_rpc_method_handler(
            self.infer,
            self.request_class.FromString,
            lambda message: (
                b"\xff" * 9 if self.fault == "garbage" else bytes(message.SerializeToString())
            ),
        )
        return grpc.method_handlers_generic_handler(
            "inference.GRPCInferenceService", {"ModelInfer": method}
        )


def main(image: str, kind: str, fault: str) -> None:
    classes = message_classes(Path(image))
    served = (RewardServer if kind == "reward" else InferenceServer)(classes, fault)
    assert not any(name.partition(".")[0] == "rolemesh" for name in sys.modules)
    server = grpc.server(
        futures.ThreadPoolExecutor(4), options=[("grpc.max_send_message_length", -1)]
    )
    server.add_generic_rpc_handlers((served.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"grpc://127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main(*sys.argv[1:])
