"""Errors cross the wire and stay what they were."""

from __future__ import annotations

import inspect

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from rolemesh.rpc import errors
from rolemesh.rpc.errors import (
    ERROR_CLASSES,
    InternalError,
    RolemeshError,
    UnavailableError,
    error_class,
    from_rpc_error,
    from_status,
    to_status,
)


@pytest.mark.parametrize("error_type", ERROR_CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("retryable", [True, False])
def test_every_class_returns_from_the_wire_as_itself(
    error_type: type[RolemeshError], retryable: bool
) -> None:
    sent = error_type("it broke", reason="ODD_REASON", retryable=retryable, metadata={"a": "b"})
    data = to_status(sent, {"role": "actor", "rank": "3", "request_id": "r"}).SerializeToString()
    got = from_status(status_pb2.Status.FromString(data))
    assert type(got) is error_type
    assert (got.message, got.reason, got.retryable) == ("it broke", "ODD_REASON", retryable)
    assert (got.role, got.rank, got.request_id) == ("actor", 3, "r")
    assert got.metadata["a"] == "b"


def test_the_list_holds_every_subclass_and_codes_are_unique() -> None:
    subclasses = {
        value
        for value in vars(errors).values()
        if inspect.isclass(value)
        and issubclass(value, RolemeshError)
        and value is not RolemeshError
    }
    assert subclasses == set(ERROR_CLASSES)
    assert len({cls.code for cls in ERROR_CLASSES}) == len(ERROR_CLASSES)


def test_every_status_code_has_a_class() -> None:
    for code in grpc.StatusCode:
        assert issubclass(error_class(code), RolemeshError)


def test_the_wire_form_is_error_info_of_our_domain() -> None:
    status = to_status(InternalError("x"), {"role": "critic"})
    info = error_details_pb2.ErrorInfo()
    assert len(status.details) == 1
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("rolemesh", "INTERNAL")
    assert dict(info.metadata) == {"role": "critic", "retryable": "false"}
    assert status.code == grpc.StatusCode.INTERNAL.value[0]


def test_a_giant_message_is_cut_so_that_it_fits_into_metadata() -> None:
    status = to_status(InternalError("x" * 100_000, metadata={"input": "y" * 100_000}))
    assert len(status.SerializeToString()) < 4096
    assert status.message.endswith("(cut; the log has all of it)")


def test_a_traceback_travels_as_debug_info_with_its_innermost_frames() -> None:
    frames = [f"/a/file.py:{line} in f{line}" for line in range(40)]
    status = to_status(InternalError("x", remote_traceback=frames))
    debug = error_details_pb2.DebugInfo()
    assert status.details[1].Unpack(debug)
    got = from_status(status_pb2.Status.FromString(status.SerializeToString()))
    assert got.remote_traceback == tuple(debug.stack_entries) == tuple(frames[-16:])


def test_giant_frames_are_cut_so_that_they_fit_into_metadata() -> None:
    frames = ["/deep" * 1000 + f"/file.py:{line} in f" for line in range(1000)]
    error = InternalError("x" * 100_000, metadata={"i": "y" * 100_000}, remote_traceback=frames)
    status = to_status(error)
    # gRPC's own bound on metadata is 16 KiB, and the message travels twice.
    assert len(status.SerializeToString()) < 8192
    assert from_status(status).remote_traceback[-1].endswith("/file.py:999 in f")


def test_the_details_of_another_domain_are_not_ours() -> None:
    status = status_pb2.Status(code=3, message="theirs")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="X", domain="example.com"))
    got = from_status(status)
    assert (got.message, got.reason) == ("theirs", "REQUEST_INVALID")


class FakeRpcError(grpc.RpcError):
    """What gRPC raises when it speaks for itself."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: object = None) -> None:
        self._parts = (code, details, trailing)

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> object:
        return self._parts[2]


def test_an_unreachable_peer_is_named_with_the_method() -> None:
    error = from_rpc_error(
        FakeRpcError(grpc.StatusCode.UNAVAILABLE, "Connection refused"),
        address="127.0.0.1:9",
        method="/rolemesh.v1.X/Y",
    )
    assert isinstance(error, UnavailableError)
    assert error.retryable
    assert "127.0.0.1:9 does not answer /rolemesh.v1.X/Y (Connection refused)" in error.message
    assert error.metadata == {"address": "127.0.0.1:9", "method": "/rolemesh.v1.X/Y"}


def test_torn_details_fall_back_to_the_status_code() -> None:
    trailing = (("grpc-status-details-bin", b"\xff\xff"),)
    error = from_rpc_error(FakeRpcError(grpc.StatusCode.NOT_FOUND, "gone", trailing))
    assert type(error).__name__ == "NotFoundError"


def test_our_own_errors_pass_unchanged() -> None:
    error = InternalError("x")
    assert from_rpc_error(error) is error
