"""Messages of the open inference protocol, version 2 (gRPC), as far as an inference needs them.

They are made here from their field numbers, in their own descriptor pool. So they cannot clash with
another package `inference` in this process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

INFER_METHOD = "/inference.GRPCInferenceService/ModelInfer"

_Field = descriptor_pb2.FieldDescriptorProto

# name, number, type; "*" before a type: repeated; a type is a message of the table, or a scalar.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "InferTensorContents": (
        ("bool_contents", 1, "*bool"),
        ("int_contents", 2, "*int32"),
        ("int64_contents", 3, "*int64"),
        ("uint_contents", 4, "*uint32"),
        ("uint64_contents", 5, "*uint64"),
        ("fp32_contents", 6, "*float"),
        ("fp64_contents", 7, "*double"),
        ("bytes_contents", 8, "*bytes"),
    ),
    "InferInputTensor": (
        ("name", 1, "string"),
        ("datatype", 2, "string"),
        ("shape", 3, "*int64"),
        ("contents", 5, "InferTensorContents"),
    ),
    "InferRequestedOutputTensor": (("name", 1, "string"),),
    "InferOutputTensor": (
        ("name", 1, "string"),
        ("datatype", 2, "string"),
        ("shape", 3, "*int64"),
        ("contents", 5, "InferTensorContents"),
    ),
    "ModelInferRequest": (
        ("model_name", 1, "string"),
        ("model_version", 2, "string"),
        ("id", 3, "string"),
        ("inputs", 5, "*InferInputTensor"),
        ("outputs", 6, "*InferRequestedOutputTensor"),
        ("raw_input_contents", 7, "*bytes"),
    ),
    "ModelInferResponse": (
        ("model_name", 1, "string"),
        ("model_version", 2, "string"),
        ("id", 3, "string"),
        ("outputs", 5, "*InferOutputTensor"),
        ("raw_output_contents", 6, "*bytes"),
    ),
}


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="rolemesh_inference.proto", package="inference", syntax="proto3"
    )
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, number, type_name in fields:
            bare = type_name.removeprefix("*")
            field = described.field.add(name=name, number=number)
            field.label = (
                _Field.LABEL_REPEATED if type_name.startswith("*") else _Field.LABEL_OPTIONAL
            )
            if bare in _MESSAGES:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".inference.{bare}"
            else:
                field.type = _Field.Type.Value(f"TYPE_{bare.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _message_classes()
ModelInferRequest = _CLASSES["ModelInferRequest"]
ModelInferResponse = _CLASSES["ModelInferResponse"]
