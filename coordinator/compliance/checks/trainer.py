"""TrainerService and WeightsService: gradients first, then one step, once."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from rolemesh.coordinator.compliance.check import check
from rolemesh.coordinator.compliance.contract import Level
from rolemesh.coordinator.compliance.samples import ordinary_samples
from rolemesh.coordinator.compliance.subject import (
    Subject,
    events_of,
    expect,
    need,
    result_in,
    shorten,
)
from rolemesh.rpc.calls.result_call import ResultCall
from rolemesh.rpc.calls.service_client import to_algorithm_part
from rolemesh.rpc.experience.columns import ColumnData
from rolemesh.v1 import trainer_pb2, weights_pb2

trainer_check = partial(check, roles=("actor", "critic"))

LOSSES = {"actor": "sft", "critic": "ppo_value"}
"""A loss of each role; the suite serves the columns that they read."""


def _backward(
    subject: Subject, loss: str, *, without_gradients: bool = False
) -> ResultCall[trainer_pb2.ForwardBackwardResult]:
    need("TrainerService", subject)
    samples = ordinary_samples()
    lengths = [len(sample.completion_tokens) for sample in samples]
    columns = {
        "loss_mask": ColumnData.completion([[True] * length for length in lengths], np.bool_),
        "values": ColumnData.completion([[0.0] * length for length in lengths]),
        "returns": ColumnData.completion([[1.0] * length for length in lengths]),
    }
    ref = subject.producer.serve(samples, subject.run_id, more=columns)
    key = subject.key("compliance.backward")
    return subject.client.forward_backward(
        key, ref, to_algorithm_part({"type": loss}), without_gradients=without_gradients
    )


async def _step(subject: Subject, key: Any, version: int) -> trainer_pb2.OptimStepResponse:
    need("TrainerService", subject)
    return await subject.client.optim_step(key, version)


async def _version(subject: Subject) -> int:
    return (await subject.client.get_status(subject.run_id)).policy_version


async def _checksums(subject: Subject) -> dict[str, str]:
    need("WeightsService", subject)
    answer = await subject.client.get_checksums(weights_pb2.WEIGHTS_HOLDER_TRAINER)
    return dict(answer.checksums)


@trainer_check(
    "trainer.no-gradient",
    Level.MUST,
    "OptimStep: FAILED_PRECONDITION (NO_GRADIENT): nothing was accumulated. ForwardBackward with "
    "`without_gradients` adds no gradient.",
)
async def no_gradient(subject: Subject) -> None:
    """An optimizer step without a gradient would still decay weights, so it is refused."""
    await _refuses_a_step(subject, "OptimStep without ForwardBackward")
    # As held-out rows are scored: nothing may be learnt from them.
    await events_of(_backward(subject, LOSSES[subject.role], without_gradients=True))
    await _refuses_a_step(subject, "OptimStep after ForwardBackward with without_gradients")


async def _refuses_a_step(subject: Subject, sent: str) -> None:
    await subject.refused(
        _step(subject, subject.key(), await _version(subject)),
        sent,
        "FAILED_PRECONDITION (NO_GRADIENT)",
        "refuse a step without gradients",
    )


@trainer_check(
    "trainer.loss-invalid",
    Level.MUST,
    "ForwardBackward: INVALID_ARGUMENT (SPEC_INVALID): unknown loss or wrong parameters; names the "
    "field.",
)
async def loss_invalid(subject: Subject) -> None:
    """Asks for a loss that does not exist."""
    await subject.refused(
        events_of(_backward(subject, "compliance_no_such_loss")),
        "ForwardBackward with an unknown loss",
        "INVALID_ARGUMENT (SPEC_INVALID)",
        "refuse losses that you do not have, by name",
    )


@trainer_check(
    "trainer.steps",
    Level.MUST,
    "ForwardBackward accumulates gradients without changing weights; OptimStep raises "
    "policy_version by one, and a repeat steps once.",
)
async def steps(subject: Subject) -> None:
    """Makes two calls, of which only the second one changes the weights, once."""
    before, version = await _checksums(subject), await _version(subject)
    sent = f"ForwardBackward with the loss {LOSSES[subject.role]}"
    result = result_in(await events_of(_backward(subject, LOSSES[subject.role])), sent)
    loss = getattr(result, "report", trainer_pb2.ForwardBackwardResult().report).metrics["loss"]
    expect(
        math.isfinite(loss),
        sent=sent,
        came=f"a loss of {loss}",
        remedy='report the finite metric "loss"',
    )
    expect(
        await _checksums(subject) == before and await _version(subject) == version,
        sent=sent,
        came="other weights, or another version",
        remedy="keep gradients, and leave weights and version to OptimStep",
    )
    key = subject.key("compliance.step")
    first, again = [(await _step(subject, key, version)).policy_version for _ in range(2)]
    now = await _version(subject)
    expect(
        first == again == now == version + 1,
        sent=f"OptimStep at version {version}, twice with one key, then GetStatus",
        came=f"versions {first}, {again} and {now}",
        remedy="step once a key, and raise the version by one",
    )
    expect(
        await _checksums(subject) != before,
        sent="GetChecksums before and after OptimStep",
        came="the same checksums",
        remedy="apply the gradients, and hash the weights as they are",
    )


@trainer_check(
    "trainer.version",
    Level.MUST,
    "OptimStep: FAILED_PRECONDITION (VERSION_MISMATCH): the weights are not at "
    "expected_policy_version.",
)
async def version_mismatch(subject: Subject) -> None:
    """A coordinator that has missed a step must get an error."""
    version = await _version(subject)
    await events_of(_backward(subject, LOSSES[subject.role]))
    await subject.refused(
        _step(subject, subject.key(), version + 1),
        f"OptimStep that expects version {version + 1} at version {version}",
        "FAILED_PRECONDITION (VERSION_MISMATCH)",
        "compare the expected version with that of the weights first",
    )
    await _step(subject, subject.key(), version)


@trainer_check(
    "weights.manifest",
    Level.MUST,
    "GetManifest: the parameters, in the model's order. Tied parameters appear once.",
)
async def manifest(subject: Subject) -> None:
    """Names are unique, and shapes are those of tensors."""
    need("WeightsService", subject)
    parameters = (await subject.client.get_manifest()).parameters
    names = [parameter.name for parameter in parameters]
    odd = [
        parameter.name
        for parameter in parameters
        if not parameter.dtype or any(size < 1 for size in parameter.shape)
    ]
    expect(
        bool(names) and len(names) == len(set(names)) and not odd,
        sent="GetManifest",
        came=f"{len(names)} parameters, {len(set(names))} names, without type or size: "
        f"{shorten(odd)}",
        remedy="name each parameter once, with its global shape and element type",
    )
