"""RewardService: one finite number a trajectory, in order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from rolemesh.coordinator.compliance.check import check
from rolemesh.coordinator.compliance.contract import (
    REWARD_ROLES,
    BrokenContractError,
    Level,
    NotApplicableError,
    Serves,
    column_schema,
)
from rolemesh.coordinator.compliance.samples import (
    Sample,
    make_sample,
    odd_samples,
    ordinary_samples,
)
from rolemesh.coordinator.compliance.subject import (
    Subject,
    describe_error,
    events_of,
    expect,
    experience_in,
    result_in,
    shorten,
)
from rolemesh.rpc.errors import RolemeshError
from rolemesh.v1 import experience_pb2, reward_pb2, reward_pb2_grpc

reward_check = partial(check, roles=REWARD_ROLES)

LARGE_BATCH_ROWS = 512
LARGE_BATCH_BYTES = 7_000
"""Bytes of each completion. Together they stay just below the 4 MiB of one message."""


async def judge(subject: Subject, samples: Sequence[Sample]) -> list[float]:
    """The rewards of some trajectories, under a new key."""
    sent = f"{len(samples)} trajectories"
    result = result_in(await events_of(subject.work(subject.key(), samples)), sent)
    if isinstance(result, reward_pb2.Rewards):
        return list(result.rewards)
    ref = experience_in(result, sent)
    rows = await subject.rows(ref, [subject.column])
    return [float(value) for value in rows[subject.column].values]


def _expect_one_each(rewards: Sequence[float], samples: Sequence[Sample], what: str) -> None:
    expect(
        len(rewards) == len(samples),
        sent=f"{len(samples)} {what}",
        came=f"{len(rewards)} rewards",
        remedy="answer exactly one number a trajectory",
    )


def _expect_finite(rewards: Sequence[float], samples: Sequence[Sample], what: str) -> None:
    wrong = [
        f"{value} for row {row}, {samples[row].completion[:40]!r}"
        for row, value in enumerate(rewards[: len(samples)])
        if not math.isfinite(value)
    ]
    expect(
        not wrong,
        sent=f"{len(samples)} {what}",
        came=shorten("; ".join(wrong)),
        remedy="refuse the call with FAILED_PRECONDITION (REWARD_INVALID) when a row cannot be "
        "judged; never send NaN or infinity",
    )


@reward_check("reward.one-each", Level.MUST, "One finite number a trajectory.")
async def one_each(subject: Subject) -> None:
    """There are as many rewards as trajectories."""
    samples = ordinary_samples()
    _expect_one_each(await judge(subject, samples), samples, "trajectories")
    _expect_one_each(await judge(subject, samples[:1]), samples[:1], "trajectory")


@reward_check("reward.finite", Level.MUST, "Every reward must be finite.")
async def finite(subject: Subject) -> None:
    """NaN would reach the weights."""
    samples = ordinary_samples()
    _expect_finite(await judge(subject, samples), samples, "trajectories")


@reward_check("reward.order", Level.MUST, "rewards: one for each trajectory in the same order.")
async def order(subject: Subject) -> None:
    """Sends the same trajectories rotated by one: the rewards have to rotate with them."""
    samples = ordinary_samples()
    first = await judge(subject, samples)
    again = await judge(subject, samples)
    moved = await judge(subject, [*samples[1:], samples[0]])
    if any(not math.isfinite(value) for value in (*first, *again, *moved)) or not (
        len(first) == len(again) == len(moved) == len(samples)
    ):
        raise NotApplicableError("the rewards are not one finite number each: see the other checks")
    if len(set(first)) == 1:
        raise NotApplicableError("all rewards were equal, so that their order cannot be seen")
    if first != again:
        raise NotApplicableError("the same trajectories got other rewards the second time")
    expect(
        moved == [*first[1:], first[0]],
        sent="seven trajectories, then the same with the first one last",
        came=f"{shorten(first, 120)}, then {shorten(moved, 120)}",
        remedy="answer in the order of the request, also when you judge in parallel or sort",
    )
    alone = [(await judge(subject, [sample]))[0] for sample in samples]
    expect(
        sorted(alone) != sorted(first) or alone == first,
        sent="seven trajectories together, then each alone",
        came=f"{shorten(first, 120)}, then {shorten(alone, 120)}",
        remedy="answer in the order of the request, also when you judge in parallel or sort",
    )


@reward_check(
    "reward.texts",
    Level.MUST,
    "Texts are UTF-8 of any kind: every one of them gets a finite reward.",
)
async def texts(subject: Subject) -> None:
    """Sends texts in other scripts, with control characters, with markup, and a long one."""
    samples = odd_samples()
    rewards = await judge(subject, samples)
    _expect_one_each(rewards, samples, "odd texts")
    _expect_finite(rewards, samples, "odd texts")


@reward_check(
    "reward.empty-completion",
    Level.MUST,
    "A completion may be empty text: a policy may stop at once.",
)
async def empty_completion(subject: Subject) -> None:
    """The only token of the completion is the end token."""
    samples = [make_sample(1, ""), make_sample(2, "12"), make_sample(3, "")]
    rewards = await judge(subject, samples)
    _expect_one_each(rewards, samples, "trajectories of which two are empty")
    _expect_finite(rewards, samples, "trajectories of which two are empty")


@reward_check("reward.large-batch", Level.MUST, "trajectories: inline, at most 4 MiB.")
async def large_batch(subject: Subject) -> None:
    """Sends a batch that is as large as a message may be."""
    samples = [make_sample(seed, "x" * LARGE_BATCH_BYTES) for seed in range(LARGE_BATCH_ROWS)]
    try:
        rewards = await judge(subject, samples)
    except RolemeshError as error:
        raise BrokenContractError(
            sent=f"{LARGE_BATCH_ROWS} trajectories of {LARGE_BATCH_BYTES} bytes",
            came=describe_error(error),
            remedy="take messages of up to 4 MiB (gRPC's default), and batch within the server",
        ) from error
    _expect_one_each(rewards, samples, "trajectories of nearly 4 MiB in all")


@reward_check(
    "reward.nothing-to-judge",
    Level.MUST,
    "INVALID_ARGUMENT (INPUT_MISSING): neither an experience nor a trajectory was sent.",
)
async def nothing_to_judge(subject: Subject) -> None:
    """Two ways to send a request without a trajectory."""
    stub = reward_pb2_grpc.RewardServiceStub(subject.channel)
    for sent, request in (
        ("ComputeReward without input", reward_pb2.ComputeRewardRequest(key=subject.key())),
        (
            "ComputeReward of no trajectories",
            reward_pb2.ComputeRewardRequest(
                key=subject.key(), trajectories=reward_pb2.TrajectoryBatch()
            ),
        ),
    ):
        await subject.refused(
            events_of(stub.ComputeReward(request, timeout=subject.timeout_s)),
            sent,
            "INVALID_ARGUMENT (INPUT_MISSING)",
            "refuse a request without trajectories",
        )


@reward_check(
    "reward.pass-at", Level.SHOULD, "INVALID_ARGUMENT (PASS_AT_INVALID): pass_at with trajectories."
)
async def pass_at(subject: Subject) -> None:
    """Inline trajectories do not say which of them belong to one prompt."""
    batch = reward_pb2.TrajectoryBatch(trajectories=[one.inline() for one in ordinary_samples()])
    request = reward_pb2.ComputeRewardRequest(key=subject.key(), trajectories=batch, pass_at=[1])
    stub = reward_pb2_grpc.RewardServiceStub(subject.channel)
    await subject.refused(
        events_of(stub.ComputeReward(request, timeout=subject.timeout_s)),
        "ComputeReward of trajectories with pass_at 1",
        "INVALID_ARGUMENT (PASS_AT_INVALID)",
        "refuse pass_at with trajectories",
    )


@reward_check(
    "reward.reference-refused",
    Level.SHOULD,
    "INVALID_ARGUMENT (INPUT_UNSUPPORTED): references are not accepted here; send trajectories.",
    serves=Serves.TRAJECTORIES,
)
async def reference_refused(subject: Subject) -> None:
    """Sends a reference to a server that does not pull."""
    ref = experience_pb2.ExperienceRef(run_id=subject.run_id, step=1, num_rows=1)
    await subject.refused(
        events_of(subject.client.compute_reward(subject.key(), ref)),
        "ComputeReward of an experience",
        "INVALID_ARGUMENT (INPUT_UNSUPPORTED)",
        "refuse references where trajectories are expected",
    )


@reward_check(
    "reward.column",
    Level.MUST,
    "A service that takes `experience` answers with the column rewards (of a cost: costs), "
    "float32, row.",
    serves=Serves.RUNS,
)
async def column(subject: Subject) -> None:
    """The column has exactly the rows of the request."""
    ref = experience_in(await subject.usual_result(), "an experience")
    schemas = [schema for group in ref.groups for schema in group.columns]
    wanted = column_schema(subject.column)
    expect(
        schemas == [wanted] and ref.num_rows == len(ordinary_samples()),
        sent=f"ComputeReward of an experience of {len(ordinary_samples())} rows",
        came=f"{ref.num_rows} rows of {shorten(schemas)}",
        remedy=f"publish one column {subject.column}, float32, one value a row",
    )
