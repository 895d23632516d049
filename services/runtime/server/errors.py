"""The error catalogue: exception class -> (status, REASON, retryable), in one table.

Classes stand by their dotted names, so that the light runtime imports neither vLLM nor a model.
A subclass is covered by its nearest listed base.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import grpc
from pydantic import ValidationError

from rolemesh.engine.specs.urls import without_passwords
from rolemesh.rpc.errors import RolemeshError, error_class

FAILED_RANK = "failed_rank"
"""Key of an error's metadata: the rank of this service that failed, when it is not the face."""


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """How an exception class travels."""

    code: grpc.StatusCode
    """gRPC status."""
    reason: str
    """ErrorInfo.reason."""
    retryable: bool = False
    """Whether the same call may succeed later without a change."""


_INVALID = grpc.StatusCode.INVALID_ARGUMENT
_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType(
    {
        "rolemesh.rpc.identity.IdentityError": CatalogueEntry(_INVALID, "VALUE_INVALID"),
        # engine
        "rolemesh.engine.layout.payload.ColumnMissingError": CatalogueEntry(
            _INVALID, "COLUMN_MISSING"
        ),
        "rolemesh.engine.algorithms.pairs.PairIncompleteError": CatalogueEntry(
            _INVALID, "PAIR_INCOMPLETE"
        ),
        "rolemesh.engine.layout.ranks.LayoutError": CatalogueEntry(_INVALID, "SPEC_INVALID"),
        "rolemesh.engine.data.rows.PromptTooLongError": CatalogueEntry(_INVALID, "PROMPT_TOO_LONG"),
        "rolemesh.engine.rollout.model_folder.WeightsStaleError": CatalogueEntry(
            _PRECONDITION, "WEIGHTS_STALE"
        ),
        "rolemesh.engine.train.optimizer.LossNotFiniteError": CatalogueEntry(
            _PRECONDITION, "LOSS_NOT_FINITE"
        ),
        "rolemesh.engine.train.optimizer.NoGradientError": CatalogueEntry(
            _PRECONDITION, "NO_GRADIENT"
        ),
        "rolemesh.engine.train.model_in_training.GradientPendingError": CatalogueEntry(
            _PRECONDITION, "GRADIENT_PENDING"
        ),
        "rolemesh.engine.train.cut_slots.CutNotFoundError": CatalogueEntry(
            grpc.StatusCode.NOT_FOUND, "CUT_NOT_FOUND"
        ),
        "rolemesh.engine.train.cut_format.CutMismatchError": CatalogueEntry(
            _INVALID, "CUT_MISMATCH"
        ),
        "rolemesh.engine.transport.slot_files.SlotHeldError": CatalogueEntry(
            _PRECONDITION, "CUT_HELD"
        ),
        "rolemesh.engine.transport.slot_files.SlotRoomError": CatalogueEntry(
            _EXHAUSTED, "CUT_CAPACITY"
        ),
        "rolemesh.engine.transport.slots.LogHeldError": CatalogueEntry(_PRECONDITION, "CUT_HELD"),
        "rolemesh.engine.transport.slots.LogUnavailableError": CatalogueEntry(
            _EXHAUSTED, "CUT_CAPACITY"
        ),
        "rolemesh.engine.weights.checkpoint.CheckpointCorruptError": CatalogueEntry(
            grpc.StatusCode.DATA_LOSS, "CHECKPOINT_CORRUPT"
        ),
        "rolemesh.engine.weights.checkpoint.CheckpointMismatchError": CatalogueEntry(
            _INVALID, "CHECKPOINT_MISMATCH"
        ),
        "rolemesh.engine.transport.slot_readers.SlotGivenUpError": CatalogueEntry(
            grpc.StatusCode.UNAVAILABLE, "SERVICE_DRAINING"
        ),
        "rolemesh.engine.weights.checkpoint_writing.CheckpointRoomError": CatalogueEntry(
            _EXHAUSTED, "CHECKPOINT_CAPACITY"
        ),
        "rolemesh.engine.weights.folders.FolderExistsError": CatalogueEntry(
            _INVALID, "PATH_INVALID"
        ),
        "rolemesh.engine.layout.manifest.ManifestError": CatalogueEntry(
            _INVALID, "WEIGHTS_MISMATCH"
        ),
        "rolemesh.engine.layout.families.UnsupportedFamilyError": CatalogueEntry(
            _INVALID, "SPEC_INVALID"
        ),
        "rolemesh.engine.models.folder.ModelFolderError": CatalogueEntry(_INVALID, "SPEC_INVALID"),
        "rolemesh.engine.data.tokenizers.NoTokenizerError": CatalogueEntry(
            _INVALID, "SPEC_INVALID"
        ),
        "rolemesh.engine.data.prompts.EmptyDataError": CatalogueEntry(_INVALID, "DATA_EMPTY"),
        "rolemesh.engine.data.rows.DataInvalidError": CatalogueEntry(_INVALID, "DATA_INVALID"),
        "rolemesh.engine.environments.base.EnvironmentFailedError": CatalogueEntry(
            _PRECONDITION, "ENVIRONMENT_FAILED"
        ),
        "rolemesh.engine.environments.arithmetic.ArithmeticInvalidError": CatalogueEntry(
            _INVALID, "ARITHMETIC_INVALID"
        ),
        "rolemesh.engine.user_code.UserCodeError": CatalogueEntry(_INVALID, "USER_CODE_INVALID"),
        "rolemesh.engine.grants.NotGrantedError": CatalogueEntry(
            grpc.StatusCode.PERMISSION_DENIED, "NOT_GRANTED"
        ),
        "rolemesh.engine.rewards.sources.RewardInvalidError": CatalogueEntry(
            _PRECONDITION, "REWARD_INVALID"
        ),
        "rolemesh.engine.transport.shm.SegmentInvalidError": CatalogueEntry(
            _INVALID, "TENSOR_MALFORMED"
        ),
        "rolemesh.engine.transport.rendezvous.OfferInvalidError": CatalogueEntry(
            _PRECONDITION, "TRANSPORT_MISMATCH"
        ),
        "rolemesh.engine.transport.selection.TransportUnavailableError": CatalogueEntry(
            _PRECONDITION, "TRANSPORT_UNAVAILABLE"
        ),
        # The weights may not be used any more, so the step starts again, not the call.
        "rolemesh.engine.transport.base.TransferFailedError": CatalogueEntry(
            grpc.StatusCode.ABORTED, "TRANSFER_FAILED"
        ),
        "rolemesh.engine.weights.transfer.TransferMismatchError": CatalogueEntry(
            _PRECONDITION, "WEIGHTS_MISMATCH"
        ),
        # wire
        "rolemesh.rpc.tracing.TracingError": CatalogueEntry(_PRECONDITION, "TRACING_UNAVAILABLE"),
        "rolemesh.rpc.payload_stream.PayloadMalformedError": CatalogueEntry(
            _INVALID, "TENSOR_MALFORMED"
        ),
        # runtime
        "rolemesh.services.runtime.server.config.ConfigError": CatalogueEntry(
            _INVALID, "CONFIG_INVALID"
        ),
        "rolemesh.services.runtime.hosts.link.HostsError": CatalogueEntry(
            _PRECONDITION, "START_FAILED"
        ),
        "rolemesh.services.runtime.service_server.ServiceStartError": CatalogueEntry(
            _PRECONDITION, "START_FAILED"
        ),
        "rolemesh.services.runtime.calls.call.MetricNotFiniteError": CatalogueEntry(
            _PRECONDITION, "METRIC_NOT_FINITE"
        ),
        # outside rewards
        "rolemesh.services.reward.outside.base.OutsideRewardError": CatalogueEntry(
            _PRECONDITION, "REWARD_FAILED"
        ),
        # Also FAILED_PRECONDITION: the caller did reach this service, and all tries have been made.
        "rolemesh.services.reward.outside.base.RewardUnavailableError": CatalogueEntry(
            _PRECONDITION, "REWARD_UNAVAILABLE"
        ),
        "rolemesh.services.reward.outside.base.RewardTimeoutError": CatalogueEntry(
            _PRECONDITION, "REWARD_TIMEOUT"
        ),
        "rolemesh.services.reward.outside.base.RewardRefusedError": CatalogueEntry(
            _PRECONDITION, "REWARD_REFUSED"
        ),
        "rolemesh.services.reward.outside.base.RewardAnswerInvalidError": CatalogueEntry(
            _PRECONDITION, "REWARD_ANSWER_INVALID"
        ),
        "rolemesh.services.reward.outside.functions.process.FunctionFailedError": CatalogueEntry(
            _PRECONDITION, "REWARD_FAILED"
        ),
        "rolemesh.services.reward.outside.functions.answers.FunctionFaultError": CatalogueEntry(
            _PRECONDITION, "REWARD_FAILED"
        ),
        "rolemesh.services.reward.outside.check.samples.CheckInputError": CatalogueEntry(
            _INVALID, "CHECK_INPUT_INVALID"
        ),
        # libraries
        "pydantic_core._pydantic_core.ValidationError": CatalogueEntry(_INVALID, "SPEC_INVALID"),
        "torch.OutOfMemoryError": CatalogueEntry(_EXHAUSTED, "OUT_OF_MEMORY"),
        # Python
        "builtins.MemoryError": CatalogueEntry(_EXHAUSTED, "OUT_OF_MEMORY"),
        "builtins.FileNotFoundError": CatalogueEntry(_INVALID, "PATH_INVALID"),
        "builtins.NotADirectoryError": CatalogueEntry(_INVALID, "PATH_INVALID"),
        "builtins.IsADirectoryError": CatalogueEntry(_INVALID, "PATH_INVALID"),
        "builtins.FileExistsError": CatalogueEntry(_INVALID, "PATH_INVALID"),
        "builtins.PermissionError": CatalogueEntry(_INVALID, "PATH_INVALID"),
        "builtins.TimeoutError": CatalogueEntry(
            grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"
        ),
        "builtins.NotImplementedError": CatalogueEntry(
            grpc.StatusCode.UNIMPLEMENTED, "UNIMPLEMENTED"
        ),
        "builtins.ValueError": CatalogueEntry(_INVALID, "VALUE_INVALID"),
    }
)
"""Every exception class that leaves a service as another status than INTERNAL."""


def dotted_name(exception_class: type[BaseException]) -> str:
    """The name under which a class stands in the catalogue."""
    return f"{exception_class.__module__}.{exception_class.__qualname__}"


def entry_for(exception_class: type[BaseException]) -> CatalogueEntry | None:
    """The entry of the class or of its nearest base, None when there is none."""
    for base in exception_class.__mro__:
        entry = CATALOGUE.get(dotted_name(base))
        if entry is not None:
            return entry
    return None


def describe(error: BaseException) -> RolemeshError:
    """Translates an exception into the error that is sent.

    A class outside the catalogue becomes INTERNAL whose message carries type and message of the
    exception and of its root cause: the user sees why, and the log has the traceback.
    """
    if isinstance(error, RolemeshError):
        return error
    entry = entry_for(type(error))
    if entry is None:
        return error_class(grpc.StatusCode.INTERNAL)(
            _with_cause(error),
            metadata={"exception": dotted_name(type(error))},
            remote_traceback=_frames(error),
        )
    message = (
        _validation_message(error) if isinstance(error, ValidationError) else _plain_message(error)
    )
    return error_class(entry.code)(
        message,
        reason=entry.reason,
        retryable=entry.retryable,
        metadata={"exception": dotted_name(type(error))},
    )


def is_expected(error: BaseException) -> bool:
    """Whether the catalogue or the hierarchy knows the exception: no traceback is needed."""
    return isinstance(error, RolemeshError) or entry_for(type(error)) is not None


def _plain_message(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _with_cause(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    where = traceback.extract_tb(error.__traceback__)
    if where:
        text += f" (at {where[-1].filename}:{where[-1].lineno} in {where[-1].name})"
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return text if cause is None else f"{text}; caused by {type(cause).__name__}: {cause}"


def _frames(error: BaseException) -> tuple[str, ...]:
    """Places of the traceback, outermost first, without lines of code: they may hold a secret."""
    return tuple(
        f"{frame.filename}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    )


def _validation_message(error: ValidationError) -> str:
    problems = []
    for problem in error.errors(include_url=False, include_context=False):
        field = ".".join(str(part) for part in problem["loc"]) or "the whole"
        given = without_passwords(problem["input"])
        problems.append(f"{error.title}: {field} is {given!r}: {problem['msg']}")
    return "; ".join(problems)
