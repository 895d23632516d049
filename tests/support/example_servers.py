"""Servers of examples and outsiders as processes of their own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OUTSIDER = Path(__file__).with_name("proto_outsider.py")

INFERENCE_PROTO = """\
syntax = "proto3";
package inference;
service GRPCInferenceService {
  rpc ModelInfer(ModelInferRequest) returns (ModelInferResponse) {}
}
message InferParameter {
  oneof parameter_choice { bool bool_param = 1; int64 int64_param = 2; string string_param = 3; }
}
message InferTensorContents {
  repeated bool bool_contents = 1;
  repeated int32 int_contents = 2;
  repeated int64 int64_contents = 3;
  repeated uint32 uint_contents = 4;
  repeated uint64 uint64_contents = 5;
  repeated float fp32_contents = 6;
  repeated double fp64_contents = 7;
  repeated bytes bytes_contents = 8;
}
message ModelInferRequest {
  message InferInputTensor {
    string name = 1;
    string datatype = 2;
    repeated int64 shape = 3;
    map<string, InferParameter> parameters = 4;
    InferTensorContents contents = 5;
  }
  message InferRequestedOutputTensor {
    string name = 1;
    map<string, InferParameter> parameters = 2;
  }
  string model_name = 1;
  string model_version = 2;
  string id = 3;
  map<string, InferParameter> parameters = 4;
  repeated InferInputTensor inputs = 5;
  repeated InferRequestedOutputTensor outputs = 6;
  repeated bytes raw_input_contents = 7;
}
message ModelInferResponse {
  message InferOutputTensor {
    string name = 1;
    string datatype = 2;
    repeated int64 shape = 3;
    map<string, InferParameter> parameters = 4;
    InferTensorContents contents = 5;
  }
  string model_name = 1;
  string model_version = 2;
  string id = 3;
  map<string, InferParameter> parameters = 4;
  repeated InferOutputTensor outputs = 5;
  repeated bytes raw_output_contents = 6;
}
"""
"""The open inference protocol as its servers declare it: field numbers of the standard."""


@contextlib.contextmanager
def script(file: Path, *arguments: str) -> Iterator[str]:
    """Runs a server that prints its URL; gives the URL."""
    # Isolated: what it imports is not found because a test put it onto the path.
    process = subprocess.Popen(
        [sys.executable, "-I", str(file), *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url, f"{file.name} ended with {process.wait(30)}"
        yield url
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


def compile_protos(source: Path, image: Path) -> Path:
    """Descriptors of a folder of protos, made by buf: all that an outsider starts from."""
    buf = Path(sys.executable).with_name("buf")
    subprocess.run(
        [str(buf), "build", str(source), "--as-file-descriptor-set", "-o", str(image)], check=True
    )
    return image
