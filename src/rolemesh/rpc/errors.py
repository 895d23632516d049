"""One hierarchy of errors for both ends of the wire.

A service raises one of these (or an exception of its catalogue) and the interceptor sends it as
google.rpc.Status with ErrorInfo; the client gets the same class back. grpc.RpcError never escapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

ERROR_DOMAIN = "rolemesh"
"""Domain of every ErrorInfo that rolemesh sends."""

STATUS_DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata key under which gRPC carries google.rpc.Status."""

MAX_MESSAGE_CHARACTERS = 2000
"""Longest message; longer ones are cut, since gRPC sends a message twice in 16 KiB of metadata."""

MAX_METADATA_CHARACTERS = 500
"""Longest value of ErrorInfo.metadata, for the same reason."""

MAX_TRACEBACK_ENTRIES = 16
"""Most frames of a traceback that are sent, the innermost ones, for the same reason."""

MAX_TRACEBACK_CHARACTERS = 200
"""Longest text of a frame; a longer one keeps its end."""


class RolemeshError(Exception):
    """The error of a call, with typed attributes.

    Attributes:
        message: for people: the field, the value and the remedy.
        reason: UPPER_SNAKE constant of the catalogue, for programs.
        retryable: whether the same call may succeed later without a change.
        metadata: every dynamic value, e.g. role, rank, request_id, method.
        is_broken_connection: whether gRPC itself could not reach the peer or lost it, and the peer
            sent no status: the call may have had its effect or not.
        remote_traceback: frames of the service that failed unexpectedly, outermost first; empty
            for every other error.

    Example::

        error = PreconditionError("epoch 3 is older than 4", reason="STALE_EPOCH")
        from_status(to_status(error)).reason == "STALE_EPOCH"
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    default_reason: ClassVar[str] = "INTERNAL"
    default_retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        retryable: bool | None = None,
        metadata: Mapping[str, str] | None = None,
        remote_traceback: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = self.default_reason if reason is None else reason
        self.retryable = self.default_retryable if retryable is None else retryable
        self.metadata: dict[str, str] = dict(metadata or {})
        self.remote_traceback = tuple(remote_traceback)
        self.is_broken_connection = False

    @property
    def role(self) -> str | None:
        """Role that failed, when known."""
        return self.metadata.get("role")

    @property
    def rank(self) -> int | None:
        """Rank that failed, when known."""
        value = self.metadata.get("rank", "")
        return int(value) if value.isdecimal() else None

    @property
    def request_id(self) -> str | None:
        """Id under which the call is found in the logs, when known."""
        return self.metadata.get("request_id")


class InvalidRequestError(RolemeshError):
    """The request is wrong in itself; sending it again cannot help."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "REQUEST_INVALID"


class NotFoundError(RolemeshError):
    """The service does not have what the request names."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class OutOfRangeError(RolemeshError):
    """A range reaches beyond the existing rows, steps or bytes."""

    code = grpc.StatusCode.OUT_OF_RANGE
    default_reason = "OUT_OF_RANGE"


class PreconditionError(RolemeshError):
    """The service is not in the state that the call needs."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "PRECONDITION_FAILED"


class AbortedError(RolemeshError):
    """The step has to be restarted, not the call."""

    code = grpc.StatusCode.ABORTED
    default_reason = "ABORTED"


class CapacityError(RolemeshError):
    """A bound on memory, size or number was reached."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "CAPACITY_EXCEEDED"


class UnavailableError(RolemeshError):
    """The peer does not answer, or is about to end."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "PEER_UNREACHABLE"
    default_retryable = True


class DeadlineError(RolemeshError):
    """The call took longer than its deadline. Whether it had an effect is not known."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class CallCancelledError(RolemeshError):
    """The call was cancelled by one of its ends."""

    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class DataLossError(RolemeshError):
    """Stored or sent data is damaged."""

    code = grpc.StatusCode.DATA_LOSS
    default_reason = "DATA_LOSS"


class UnsupportedError(RolemeshError):
    """The peer does not serve this method."""

    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "UNIMPLEMENTED"


class ForbiddenError(RolemeshError):
    """The caller may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class InternalError(RolemeshError):
    """The service failed unexpectedly; the message carries the root cause."""

    code = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"


ERROR_CLASSES = tuple(RolemeshError.__subclasses__())
"""The classes above, each of which stands for a status code."""

_CLASS_BY_CODE: dict[grpc.StatusCode, type[RolemeshError]] = {
    **{error_class.code: error_class for error_class in ERROR_CLASSES},
    grpc.StatusCode.UNAUTHENTICATED: ForbiddenError,
    grpc.StatusCode.ALREADY_EXISTS: PreconditionError,
    grpc.StatusCode.UNKNOWN: InternalError,
}

# StatusCode.value is (number, text).
_CODE_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def error_class(code: grpc.StatusCode) -> type[RolemeshError]:
    """The class that stands for a status code."""
    return _CLASS_BY_CODE.get(code, InternalError)


def to_status(error: RolemeshError, metadata: Mapping[str, str] | None = None) -> status_pb2.Status:
    """The wire form: google.rpc.Status with an ErrorInfo, and a DebugInfo with the traceback.

    Args:
        error: What to send.
        metadata: Further dynamic values, e.g. role and rank of the sender; they replace equal names
            of the error.
    """
    message = error.message
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = message[:MAX_MESSAGE_CHARACTERS] + " ... (cut; the log has all of it)"
    values = {**error.metadata, **(metadata or {})}
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=ERROR_DOMAIN,
        metadata={key: value[:MAX_METADATA_CHARACTERS] for key, value in values.items()},
    )
    info.metadata["retryable"] = "true" if error.retryable else "false"
    status = status_pb2.Status(code=error.code.value[0], message=message)
    status.details.add().Pack(info)
    if error.remote_traceback:
        frames = error.remote_traceback[-MAX_TRACEBACK_ENTRIES:]
        debug = error_details_pb2.DebugInfo(
            stack_entries=[frame[-MAX_TRACEBACK_CHARACTERS:] for frame in frames]
        )
        status.details.add().Pack(debug)
    return status


def from_status(status: status_pb2.Status) -> RolemeshError:
    """The error that a google.rpc.Status carries."""
    code = _CODE_BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
    debug = error_details_pb2.DebugInfo()
    for detail in status.details:
        if detail.Is(debug.DESCRIPTOR):
            detail.Unpack(debug)
    frames = tuple(debug.stack_entries)[-MAX_TRACEBACK_ENTRIES:]
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            metadata = dict(info.metadata)
            retryable = metadata.pop("retryable", "false") == "true"
            return error_class(code)(
                status.message,
                reason=info.reason,
                retryable=retryable,
                metadata=metadata,
                remote_traceback=frames,
            )
    return error_class(code)(status.message, remote_traceback=frames)


def from_rpc_error(
    error: BaseException, *, address: str | None = None, method: str | None = None
) -> RolemeshError:
    """Translates any error of a call into a RolemeshError.

    Args:
        error: A grpc.RpcError, or a RolemeshError, which is returned as it is.
        address: The peer, for the message.
        method: Full name of the method, for the message.
    """
    if isinstance(error, RolemeshError):
        return error
    if not isinstance(error, grpc.RpcError):
        return InternalError(f"{type(error).__name__}: {error}")
    where = {
        key: value for key, value in (("address", address), ("method", method)) if value is not None
    }
    status = _sent_status(error)
    if status is not None:
        sent = from_status(status)
        sent.metadata = {**where, **sent.metadata}
        return sent
    # Not a status of ours: gRPC itself failed (connection, deadline, message too large, ...).
    code = error.code() if callable(getattr(error, "code", None)) else grpc.StatusCode.UNKNOWN
    details = error.details() if callable(getattr(error, "details", None)) else str(error)
    peer = address or "the peer"
    if code is grpc.StatusCode.UNAVAILABLE:
        message = (
            f"{peer} does not answer {method or 'a call'} ({details}): "
            "see that its process runs; its log says why it ended"
        )
    elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = f"{peer} did not finish {method or 'a call'} before its deadline"
    elif code is grpc.StatusCode.UNIMPLEMENTED:
        message = f"{peer} does not serve {method or 'the method'}: it is another role or version"
    else:
        message = f"{peer}, {method or 'a call'}: {details or code.name}"
    failure = error_class(code)(message, metadata=where)
    failure.is_broken_connection = code is grpc.StatusCode.UNAVAILABLE
    return failure


def _sent_status(error: grpc.RpcError) -> status_pb2.Status | None:
    trailing = getattr(error, "trailing_metadata", None)
    metadata = trailing() if callable(trailing) else None
    # Iterate: dict() of aio metadata raises KeyError on grpcio 1.76.
    for key, value in metadata or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status()
            try:
                status.ParseFromString(value)
            except DecodeError:
                return None
            return status
    return None
