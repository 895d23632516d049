"""The models say of every field what the proto says."""

from typing import Any, get_args

import pytest

from rolemesh.coordinator.api.http import bases, models
from rolemesh.v1 import coordinator_pb2

FLOATS = ("float", "double")
SCALARS = {
    "string": {"type": "string"},
    "bool": {"type": "boolean"},
    "int64": {"type": "integer", "format": "int64"},
    "int32": {"type": "integer", "format": "int32"},
    "double": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "float": {"anyOf": [{"type": "number"}, {"type": "null"}]},
}
TYPE_NAMES = {1: "double", 2: "float", 3: "int64", 5: "int32", 8: "bool", 9: "string"}
MESSAGES: dict[type[bases.Answer], Any] = {
    models.Run: coordinator_pb2.Run,
    models.RunList: coordinator_pb2.ListRunsResponse,
    models.RunStateChange: coordinator_pb2.RunStateChange,
    models.StepMade: coordinator_pb2.StepMade,
    models.Evaluated: coordinator_pb2.Evaluated,
    models.CheckpointSaved: coordinator_pb2.CheckpointSaved,
    models.Note: coordinator_pb2.Note,
    models.Recovered: coordinator_pb2.Recovered,
    models.Resumed: coordinator_pb2.Resumed,
    models.RunEvent: coordinator_pb2.RunEvent,
    models.DataflowNode: coordinator_pb2.DataflowNode,
    models.Dataflow: coordinator_pb2.GetDataflowResponse,
    models.PlannedTask: coordinator_pb2.PlannedTask,
    models.PlannedPool: coordinator_pb2.PlannedPool,
    models.RunPlan: coordinator_pb2.RunPlan,
    models.Plan: coordinator_pb2.GetPlanResponse,
    models.SampledCall: coordinator_pb2.SampledCall,
    models.SampledSession: coordinator_pb2.SampledSession,
    models.SampledImage: coordinator_pb2.SampledImage,
    models.Sample: coordinator_pb2.Sample,
    models.SampleList: coordinator_pb2.ListSamplesResponse,
    models.DeviceUseSeries: coordinator_pb2.DeviceUseSeries,
    models.DeviceUse: coordinator_pb2.GetDeviceUseResponse,
    models.Alert: coordinator_pb2.Alert,
    models.AlertList: coordinator_pb2.ListAlertsResponse,
    models.LogPiece: coordinator_pb2.ReadLogResponse,
    models.RegisteredService: coordinator_pb2.RegisteredService,
    models.ServiceList: coordinator_pb2.ListServicesResponse,
}
"""The message that each model stands for."""
MODEL_OF = {message.DESCRIPTOR.full_name: model for model, message in MESSAGES.items()}


def expected(field: Any, *, is_repeated: bool | None = None) -> dict[str, Any]:
    """The JSON schema that a field of a proto has to have."""
    if is_repeated is None:
        is_repeated = field.is_repeated
    message = field.message_type
    if is_repeated and message is not None and message.GetOptions().map_entry:
        value = message.fields_by_name["value"]
        return {"type": "object", "additionalProperties": expected(value, is_repeated=False)}
    if is_repeated:
        return {"type": "array", "items": expected(field, is_repeated=False)}
    if message is not None and message.full_name == "google.protobuf.Timestamp":
        return {"type": "string", "format": "date-time"}
    if message is not None:
        schema: dict[str, Any] = {"$ref": f"#/$defs/{MODEL_OF[message.full_name].__name__}"}
        return {"anyOf": [schema, {"type": "null"}]} if field.containing_oneof else schema
    if field.enum_type is not None:
        names = [value.name for value in field.enum_type.values]
        prefix = names[0].removesuffix("UNSPECIFIED")
        words = sorted(name.removeprefix(prefix).lower() for name in names[1:])
        return {"type": "string", "enum": words}
    schema = SCALARS[TYPE_NAMES[field.type]]
    if field.has_presence and "anyOf" not in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    return schema


def bare(schema: Any) -> Any:
    """A schema without what is for people."""
    if isinstance(schema, dict):
        kept = {
            key: bare(value)
            for key, value in schema.items()
            if key not in ("title", "description", "default")
        }
        if "enum" in kept:
            kept["enum"] = sorted(kept["enum"])
        return kept
    return [bare(one) for one in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("model", MESSAGES, ids=lambda model: model.__name__)
def test_a_model_has_the_fields_of_its_message(model: type[bases.Answer]) -> None:
    fields = MESSAGES[model].DESCRIPTOR.fields
    properties = model.model_json_schema()["properties"]

    assert list(properties) == [field.name for field in fields]
    for field in fields:
        assert bare(properties[field.name]) == expected(field), field.full_name
        assert properties[field.name]["description"], field.full_name


def test_metrics_differ_from_their_message_as_documented() -> None:
    fields = [field.name for field in coordinator_pb2.GetMetricsResponse.DESCRIPTOR.fields]
    assert list(models.Metrics.model_fields) == fields


def test_words_of_states_are_those_of_the_proto() -> None:
    names = (name.removeprefix("RUN_STATE_") for name in coordinator_pb2.RunState.keys()[1:])
    assert set(get_args(models.RunStateWord)) == {name.lower() for name in names}
