"""A reward behind the open inference protocol, version 2 (KServe, Triton): gRPC or HTTP."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, urlsplit

from rolemesh.engine.specs import KServeRewardSpec
from rolemesh.rpc.errors import RolemeshError
from rolemesh.services.reward.outside.base import (
    Judgement,
    RewardAnswerInvalidError,
    RewardClient,
    RewardRow,
    checked_rewards,
    shown,
)
from rolemesh.services.reward.outside.protocols.grpc_channel import GrpcEndpoint, reward_error
from rolemesh.services.reward.outside.protocols.http import JsonClient, encoded
from rolemesh.services.reward.outside.protocols.inference_protocol import (
    INFER_METHOD,
    ModelInferRequest,
    ModelInferResponse,
)

_RAW_FORMATS = {"FP16": "e", "FP32": "f", "FP64": "d", "INT32": "i", "INT64": "q"}
"""Code of `struct` by datatype; raw contents are little-endian, row after row."""

_CONTENTS = {
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
}

_REMEDY = "name the output in the source's output, and see that the model gives one number a row"


def make_kserve_client(url: str, spec: KServeRewardSpec) -> RewardClient:
    """Makes the client for the scheme of the URL."""
    is_grpc = urlsplit(url).scheme in ("grpc", "grpcs")
    return KServeGrpcClient(url, spec) if is_grpc else KServeHttpClient(url, spec)


class KServeGrpcClient(RewardClient):
    """ModelInfer over gRPC."""

    def __init__(self, url: str, spec: KServeRewardSpec) -> None:
        """Prepares; raises ValueError if the URL or the token's variable is wrong."""
        self.endpoint = url
        self._spec = spec
        self._grpc = GrpcEndpoint(url, spec)

    async def ask(self, rows: Sequence[RewardRow]) -> Judgement:
        """See `RewardClient.ask`."""
        request = ModelInferRequest(model_name=self._spec.model, model_version=self._spec.version)
        for name, texts in _inputs(rows, self._spec).items():
            tensor = request.inputs.add(
                name=name, datatype="BYTES", shape=_shape(len(rows), self._spec)
            )
            tensor.contents.bytes_contents.extend(text.encode("utf-8", "replace") for text in texts)
        request.outputs.add(name=self._spec.output)
        infer = self._grpc.channel.unary_unary(
            INFER_METHOD,
            request_serializer=ModelInferRequest.SerializeToString,
            response_deserializer=ModelInferResponse.FromString,
        )
        try:
            response = await infer(
                request, timeout=self._spec.timeout_s, metadata=self._grpc.metadata
            )
        except RolemeshError as error:
            raise reward_error(self.endpoint, error) from error
        if response is None:  # gRPC gives None for bytes that it cannot read
            raise _invalid(self.endpoint, self._spec, "bytes that are no ModelInferResponse")
        names = [tensor.name for tensor in response.outputs]
        if self._spec.output not in names:
            raise _invalid(self.endpoint, self._spec, f"outputs {names}")
        index = names.index(self._spec.output)
        values = self._values(response, index)
        shape = list(response.outputs[index].shape)
        return _judgement(values, shape, len(rows), self.endpoint, self._spec)

    def sent(self, row: RewardRow) -> bytes:
        """See `RewardClient.sent`."""
        return encoded(_inputs([row], self._spec))

    async def close(self) -> None:
        """Closes the connection."""
        await self._grpc.close()

    def _values(self, response: Any, index: int) -> list[Any]:
        """Numbers of an output, from its typed contents or from raw bytes."""
        tensor = response.outputs[index]
        if not response.raw_output_contents:
            if tensor.datatype not in _CONTENTS:
                raise _invalid(self.endpoint, self._spec, f"datatype {tensor.datatype!r}")
            return list(getattr(tensor.contents, _CONTENTS[tensor.datatype]))
        if tensor.datatype not in _RAW_FORMATS or index >= len(response.raw_output_contents):
            found = f"datatype {tensor.datatype!r}, {len(response.raw_output_contents)} raw tensors"
            raise _invalid(self.endpoint, self._spec, found)
        raw = response.raw_output_contents[index]
        number = struct.Struct("<" + _RAW_FORMATS[tensor.datatype])
        if len(raw) % number.size:
            raise _invalid(self.endpoint, self._spec, f"{len(raw)} raw bytes")
        return [value for (value,) in number.iter_unpack(raw)]


class KServeHttpClient(JsonClient[KServeRewardSpec]):
    """POST /v2/models/<model>[/versions/<version>]/infer with JSON tensors."""

    remedy = _REMEDY

    def __init__(self, url: str, spec: KServeRewardSpec) -> None:
        """Prepares; raises ValueError if the token's variable is not set."""
        version = f"/versions/{quote(spec.version, safe='')}" if spec.version else ""
        path = f"/v2/models/{quote(spec.model, safe='')}{version}/infer"
        super().__init__(url.rstrip("/") + path, spec)

    async def ask(self, rows: Sequence[RewardRow]) -> Judgement:
        """See `RewardClient.ask`."""
        payload = {
            "inputs": [
                {
                    "name": name,
                    "datatype": "BYTES",
                    "shape": _shape(len(rows), self._spec),
                    "data": texts,
                }
                for name, texts in _inputs(rows, self._spec).items()
            ],
            "outputs": [{"name": self._spec.output}],
        }
        answer, _ = await self._http.post(encoded(payload))
        outputs = answer.get("outputs") if isinstance(answer, dict) else None
        if not isinstance(outputs, list) or not all(isinstance(one, dict) for one in outputs):
            raise _invalid(self.endpoint, self._spec, shown(answer))
        named = [tensor for tensor in outputs if tensor.get("name") == self._spec.output]
        if not named:
            raise _invalid(
                self.endpoint, self._spec, f"outputs {[tensor.get('name') for tensor in outputs]}"
            )
        values, shape = named[0].get("data"), named[0].get("shape")
        if not isinstance(values, list) or not isinstance(shape, list):
            raise _invalid(self.endpoint, self._spec, shown(named[0]))
        return _judgement(values, shape, len(rows), self.endpoint, self._spec)

    def sent(self, row: RewardRow) -> bytes:
        """See `RewardClient.sent`."""
        return encoded(_inputs([row], self._spec))


def _inputs(rows: Sequence[RewardRow], spec: KServeRewardSpec) -> dict[str, list[str]]:
    inputs = {spec.completion_input: [row.completion for row in rows]}
    if spec.prompt_input is not None:
        inputs[spec.prompt_input] = [row.prompt for row in rows]
    if spec.answer_input is not None:
        inputs[spec.answer_input] = [row.answer for row in rows]
    return inputs


def _shape(num_rows: int, spec: KServeRewardSpec) -> list[int]:
    return [num_rows, 1] if spec.sends_column else [num_rows]


def _judgement(
    values: list[Any], shape: list[Any], num_rows: int, endpoint: str, spec: KServeRewardSpec
) -> Judgement:
    if shape not in ([num_rows], [num_rows, 1]):
        raise _invalid(endpoint, spec, f"shape {shown(shape)} for {num_rows} rows")
    if shape == [num_rows, 1] and all(isinstance(v, list) and len(v) == 1 for v in values):
        # Tensors in JSON may be nested or flat.
        values = [value for (value,) in values]
    return Judgement(
        rewards=checked_rewards(
            values, num_rows, endpoint, minimum=spec.minimum, maximum=spec.maximum
        )
    )


def _invalid(endpoint: str, spec: KServeRewardSpec, found: str) -> RewardAnswerInvalidError:
    return RewardAnswerInvalidError(
        endpoint,
        expected=f"the output {spec.output!r}, numbers of shape [rows] or [rows, 1]",
        found=found,
        remedy=_REMEDY,
    )
