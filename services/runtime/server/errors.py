"""The error catalogue: exception class -> (status, REASON), in one table.

Classes stand by their dotted names, so that the light runtime imports neither vLLM nor a model.
A subclass is covered by its nearest listed base.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import grpc
from pydantic import ValidationError

from rolemesh.engine.specs.urls import without_passwords
from rolemesh.rpc.errors import RolemeshError, error_class

_CHECKPOINTS = "rolemesh.engine.weights.checkpoints"

FAILED_RANK = "failed_rank"
"""Key of an error's metadata: the rank of this service that failed, when it is not the face."""


class CatalogueEntry(NamedTuple):
    """How an exception class travels: as an error that the same call would meet again."""

    code: grpc.StatusCode
    """gRPC status."""
    reason: str
    """ErrorInfo.reason."""


_REASONS: Mapping[grpc.StatusCode, Mapping[str, str]] = {
    grpc.StatusCode.INVALID_ARGUMENT: {
        "rolemesh.rpc.members.identity.IdentityError": "VALUE_INVALID",
        "rolemesh.engine.layout.payload.ColumnMissingError": "COLUMN_MISSING",
        "rolemesh.engine.algorithms.preferences.pairs.PairIncompleteError": "PAIR_INCOMPLETE",
        "rolemesh.engine.layout.ranks.LayoutError": "SPEC_INVALID",
        "rolemesh.engine.data.rows.PromptTooLongError": "PROMPT_TOO_LONG",
        "rolemesh.engine.train.cuts.format.CutMismatchError": "CUT_MISMATCH",
        f"{_CHECKPOINTS}.checkpoint.CheckpointMismatchError": "CHECKPOINT_MISMATCH",
        f"{_CHECKPOINTS}.folders.FolderExistsError": "PATH_INVALID",
        "rolemesh.engine.layout.manifest.ManifestError": "WEIGHTS_MISMATCH",
        "rolemesh.engine.layout.families.RefusedSettingError": "SPEC_INVALID",
        "rolemesh.engine.layout.families.UnsupportedFamilyError": "SPEC_INVALID",
        "rolemesh.engine.model_folders.model_files.ModelFolderError": "SPEC_INVALID",
        "rolemesh.engine.model_folders.adapter_config.AdapterFolderError": "SPEC_INVALID",
        "rolemesh.engine.model_folders.pretrained.NoTokenizerError": "SPEC_INVALID",
        # Of a command that exports by itself.
        "rolemesh.engine.llama_cpp.architecture.UnwritableModelError": "SPEC_INVALID",
        "rolemesh.engine.data.rows.EmptyDataError": "DATA_EMPTY",
        "rolemesh.engine.data.rows.DataInvalidError": "DATA_INVALID",
        "rolemesh.engine.images.prompt_images.ImageInvalidError": "DATA_INVALID",
        # The reader of images says instead which one it was.
        "rolemesh.engine.images.decoding._WorkerLostError": "DATA_INVALID",
        "rolemesh.engine.environments.arithmetic.ArithmeticInvalidError": "ARITHMETIC_INVALID",
        "rolemesh.engine.granted.user_code.UserCodeError": "USER_CODE_INVALID",
        "rolemesh.engine.transport.slots.shm.SegmentInvalidError": "TENSOR_MALFORMED",
        "rolemesh.rpc.experience.payload_stream.PayloadMalformedError": "TENSOR_MALFORMED",
        "rolemesh.services.runtime.server.config.ConfigError": "CONFIG_INVALID",
        "rolemesh.services.reward.outside.check.samples.CheckInputError": "CHECK_INPUT_INVALID",
        "pydantic_core._pydantic_core.ValidationError": "SPEC_INVALID",
        "builtins.FileNotFoundError": "PATH_INVALID",
        "builtins.NotADirectoryError": "PATH_INVALID",
        "builtins.IsADirectoryError": "PATH_INVALID",
        "builtins.FileExistsError": "PATH_INVALID",
        "builtins.PermissionError": "PATH_INVALID",
        "builtins.ValueError": "VALUE_INVALID",
        "rolemesh.engine.rollout.endpoint.wire.WireError": "VALUE_INVALID",
    },
    grpc.StatusCode.FAILED_PRECONDITION: {
        "rolemesh.engine.rollout.model_folder.WeightsStaleError": "WEIGHTS_STALE",
        "rolemesh.engine.rollout.agreement.probe.SamplerStaleError": "SAMPLER_STALE",
        "rolemesh.engine.rollout.agreement.probe.WeightsNotFiniteError": "WEIGHTS_NOT_FINITE",
        # As with rewards below: the caller did reach this service.
        "rolemesh.engine.rollout.servers.client.SamplersUnavailableError": "SAMPLER_UNAVAILABLE",
        "rolemesh.engine.rollout.servers.client.ServerUnavailableError": "SAMPLER_UNAVAILABLE",
        "rolemesh.engine.rollout.servers.client.WeightsLostError": "SAMPLER_UNAVAILABLE",
        "rolemesh.engine.rollout.servers.client.ServerError": "SAMPLER_REFUSED",
        "rolemesh.engine.rollout.servers.client.ServerRefusedError": "SAMPLER_REFUSED",
        "rolemesh.engine.rollout.servers.teacher.RowTooLongError": "SAMPLER_REFUSED",
        "rolemesh.engine.rollout.servers.admission.ServerUnfitError": "SAMPLER_REFUSED",
        "rolemesh.engine.rollout.servers.client.AnswerInvalidError": "SAMPLER_ANSWER_INVALID",
        "rolemesh.services.teacher.served.TeacherFailedError": "TEACHER_FAILED",
        "rolemesh.services.teacher.served.TeacherUnavailableError": "TEACHER_UNAVAILABLE",
        "rolemesh.engine.train.optimizers.optimizer.LossNotFiniteError": "LOSS_NOT_FINITE",
        "rolemesh.engine.train.optimizers.optimizer.NoGradientError": "NO_GRADIENT",
        "rolemesh.engine.train.model_in_training.GradientPendingError": "GRADIENT_PENDING",
        "rolemesh.engine.transport.slots.slot_files.SlotHeldError": "CUT_HELD",
        "rolemesh.engine.transport.slots.slots.LogHeldError": "CUT_HELD",
        "rolemesh.engine.environments.base.EnvironmentFailedError": "ENVIRONMENT_FAILED",
        "rolemesh.engine.sessions.results.AgentFailedError": "ENVIRONMENT_FAILED",
        "rolemesh.engine.sessions.session.SessionError": "ENVIRONMENT_FAILED",
        "rolemesh.engine.sessions.store.SessionLimitError": "ENVIRONMENT_FAILED",
        # Of a command that evaluates by itself, and of no call of a service.
        "rolemesh.engine.evaluation.asking.EndpointGoneError": "SAMPLER_UNAVAILABLE",
        "rolemesh.engine.evaluation.asking.UnansweredError": "SAMPLER_REFUSED",
        "rolemesh.services.evaluation.answers.UnscoredError": "REWARD_FAILED",
        "rolemesh.engine.rewards.sources.RewardInvalidError": "REWARD_INVALID",
        "rolemesh.engine.rewards.arithmetic.NoAnswerError": "REWARD_INVALID",
        "rolemesh.engine.transport.rendezvous.OfferInvalidError": "TRANSPORT_MISMATCH",
        "rolemesh.engine.transport.selection.TransportUnavailableError": "TRANSPORT_UNAVAILABLE",
        "rolemesh.engine.weights.transfer.TransferMismatchError": "WEIGHTS_MISMATCH",
        "rolemesh.rpc.tracing.TracingError": "TRACING_UNAVAILABLE",
        "rolemesh.services.runtime.hosts.link.HostsError": "START_FAILED",
        "rolemesh.services.runtime.service_server.ServiceStartError": "START_FAILED",
        "rolemesh.services.runtime.calls.call.MetricNotFiniteError": "METRIC_NOT_FINITE",
        "rolemesh.services.reward.outside.base.OutsideRewardError": "REWARD_FAILED",
        # Here too: the caller did reach this service, and all tries have been made.
        "rolemesh.services.reward.outside.base.RewardUnavailableError": "REWARD_UNAVAILABLE",
        "rolemesh.services.reward.outside.base.RewardTimeoutError": "REWARD_TIMEOUT",
        "rolemesh.services.reward.outside.base.RewardRefusedError": "REWARD_REFUSED",
        "rolemesh.services.reward.outside.base.RewardAnswerInvalidError": "REWARD_ANSWER_INVALID",
        "rolemesh.services.reward.outside.parts.PartsFaultError": "REWARD_ANSWER_INVALID",
        "rolemesh.services.reward.outside.functions.process.FunctionFailedError": "REWARD_FAILED",
        "rolemesh.services.reward.outside.functions.answers.FunctionFaultError": "REWARD_FAILED",
    },
    grpc.StatusCode.NOT_FOUND: {
        "rolemesh.engine.train.cuts.slots.CutNotFoundError": "CUT_NOT_FOUND",
    },
    grpc.StatusCode.RESOURCE_EXHAUSTED: {
        "rolemesh.engine.transport.slots.slot_files.SlotRoomError": "CUT_CAPACITY",
        "rolemesh.engine.transport.slots.slots.LogUnavailableError": "CUT_CAPACITY",
        "rolemesh.engine.weights.checkpoints.writing.CheckpointRoomError": "CHECKPOINT_CAPACITY",
        "torch.OutOfMemoryError": "OUT_OF_MEMORY",
        "builtins.MemoryError": "OUT_OF_MEMORY",
    },
    grpc.StatusCode.DATA_LOSS: {
        f"{_CHECKPOINTS}.checkpoint.CheckpointCorruptError": "CHECKPOINT_CORRUPT",
    },
    grpc.StatusCode.UNAVAILABLE: {
        "rolemesh.engine.transport.slots.slot_readers.SlotGivenUpError": "SERVICE_DRAINING",
        "rolemesh.services.endpoint.endpoint.EndpointClosedError": "SERVICE_DRAINING",
    },
    grpc.StatusCode.PERMISSION_DENIED: {
        "rolemesh.engine.granted.grants.NotGrantedError": "NOT_GRANTED",
    },
    grpc.StatusCode.ABORTED: {
        # The weights may not be used any more, so the step starts again, not the call.
        "rolemesh.engine.transport.base.TransferFailedError": "TRANSFER_FAILED",
        "rolemesh.engine.rollout.servers.senders.BroadcastFailedError": "TRANSFER_FAILED",
        "rolemesh.engine.train.cuts.copies.CutCopyError": "CUT_FAILED",
    },
    grpc.StatusCode.DEADLINE_EXCEEDED: {
        "builtins.TimeoutError": "DEADLINE_EXCEEDED",
    },
    grpc.StatusCode.UNIMPLEMENTED: {
        "builtins.NotImplementedError": "UNIMPLEMENTED",
    },
}

CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType(
    {
        name: CatalogueEntry(code, reason)
        for code, reasons in _REASONS.items()
        for name, reason in reasons.items()
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
        retryable=False,
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
