"""RolloutService: completions with the columns that training reads, drawn from seeds."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from rolemesh.coordinator.compliance.check import check
from rolemesh.coordinator.compliance.checks.scoring import ABOVE_ZERO
from rolemesh.coordinator.compliance.contract import (
    SAMPLING_ROLES,
    BrokenContractError,
    Level,
    NotApplicableError,
    Phase,
    column_schema,
)
from rolemesh.coordinator.compliance.subject import (
    NUM_PROMPTS,
    SAMPLING,
    Subject,
    events_of,
    expect,
    expect_progress_then_one_result,
    experience_in,
    need,
    result_in,
    shorten,
)
from rolemesh.engine.specs.columns import ENVIRONMENT_REWARDS, ROLLOUT_COLUMNS
from rolemesh.rpc.experience.columns import Columns
from rolemesh.rpc.experience.references import names_of
from rolemesh.v1 import rollout_pb2

rollout_check = partial(check, roles=SAMPLING_ROLES)

NUM_ROWS = NUM_PROMPTS * SAMPLING.samples_per_prompt
SENT = f"Generate of {NUM_PROMPTS} prompts, {SAMPLING.samples_per_prompt} samples each"

WEIGHTS_VERSION = 1
"""Version of the made-up weights that a rollout service gets."""

COLUMNS = {name: column_schema(name) for name in ROLLOUT_COLUMNS}
"""What rollout.proto promises."""


async def _sample(subject: Subject, *, step: int = 1, **options: Any) -> Columns:
    call = subject.generate(subject.key("compliance.sample", step=step), **options)
    return await subject.rows(experience_in(result_in(await events_of(call), SENT), SENT))


async def _usual(subject: Subject) -> Columns:
    ref = experience_in(await subject.usual_result(), SENT)
    missing = set(COLUMNS) - set(names_of(ref))
    if missing:
        raise NotApplicableError(f"there are no columns {sorted(missing)}: see rollout.columns")
    return await subject.rows(ref)


@rollout_check(
    "rollout.no-weights",
    Level.MUST,
    "Generate of a rollout service: FAILED_PRECONDITION (WEIGHTS_STALE): no weights came yet.",
    roles=("rollout",),
    phase=Phase.INITIALIZE,
)
async def no_weights(subject: Subject) -> None:
    """A rollout service without weights must not sample."""
    await subject.refused(
        events_of(subject.generate(subject.key())),
        "Generate before UpdateWeights",
        "FAILED_PRECONDITION (WEIGHTS_STALE)",
        "refuse to sample until weights came",
    )


@rollout_check(
    "rollout.update-weights",
    Level.MUST,
    "UpdateWeights: any number of progress messages, then one result, whose policy_version is "
    "that of the weights.",
    roles=("rollout",),
    phase=Phase.INITIALIZE,
)
async def update_weights(subject: Subject) -> None:
    """The suite makes up and serves weights that fit the server's own manifest."""
    need("WeightsService", subject)
    manifest = await subject.client.get_manifest()
    sent = f"UpdateWeights of {len(manifest.parameters)} made-up parameters"
    expect(
        bool(manifest.parameters),
        sent="GetManifest",
        came="no parameters",
        remedy="answer the parameters that the sampler takes",
    )
    ref = subject.producer.publisher.publish(
        manifest, subject.run_id, subject.producer.address, WEIGHTS_VERSION
    )
    key = subject.key("compliance.weights")
    events = await events_of(subject.client.update_weights(key, ref))
    expect_progress_then_one_result(events, sent)
    result = result_in(events, sent)
    version = getattr(result, "policy_version", None)
    expect(
        version == WEIGHTS_VERSION,
        sent=f"{sent}, version {WEIGHTS_VERSION}",
        came=f"policy_version {version}",
        remedy="answer the version that the sampler has now",
    )


@rollout_check(
    "rollout.columns",
    Level.MUST,
    "Generate: the columns " + ", ".join(COLUMNS) + " with the kinds and types of rollout.proto.",
)
async def columns(subject: Subject) -> None:
    """Further columns are allowed."""
    ref = experience_in(await subject.usual_result(), SENT)
    came = {schema.name: schema for group in ref.groups for schema in group.columns}
    missing = sorted(set(COLUMNS) - set(came))
    other = [name for name in COLUMNS if name in came and came[name] != COLUMNS[name]]
    expect(
        not missing and not other,
        sent=SENT,
        came=f"no columns {missing}, other kinds or types in {other}",
        remedy="make the columns that rollout.proto lists",
    )


@rollout_check(
    "rollout.rows",
    Level.MUST,
    "The rows of the result are ordered by prompt, then by sample index, whatever order they "
    "finished in.",
)
async def rows(subject: Subject) -> None:
    """Equal prompt_ids are neighbours, and sample_indexes begin at 0 in each group."""
    batch = await _usual(subject)
    number = SAMPLING.samples_per_prompt
    prompts = batch["prompt_ids"].values.reshape(-1, number) if batch.num_rows == NUM_ROWS else None
    fine = (
        prompts is not None
        and bool((prompts == prompts[:, :1]).all())
        and batch["sample_indexes"].values.tolist() == list(range(number)) * NUM_PROMPTS
    )
    expect(
        fine,
        sent=SENT,
        came=f"prompt_ids {batch['prompt_ids'].values.tolist()}, sample_indexes "
        f"{batch['sample_indexes'].values.tolist()}",
        remedy="sort finished completions by prompt, then by sample, before you answer",
    )


@rollout_check(
    "rollout.lengths",
    Level.MUST,
    "prompt_lengths: where the completion begins in tokens; per-token columns run over completion "
    "tokens; completions have 1 to max_new_tokens tokens.",
)
async def lengths(subject: Subject) -> None:
    """The columns agree with each other, and with the request."""
    batch = await _usual(subject)
    completion = batch["tokens"].lengths() - batch["prompt_lengths"].values
    problems = [
        f"{name} of {batch[name].lengths().tolist()} values"
        for name in ("logprobs", "loss_mask", "policy_versions")
        if batch[name].lengths().tolist() != completion.tolist()
    ]
    # An episode also holds the words of the environment.
    is_episode = ENVIRONMENT_REWARDS in batch
    if completion.min() < 1 or (completion.max() > SAMPLING.max_new_tokens and not is_episode):
        problems.append("completions out of bounds")
    cut = ~batch["finished"].values
    if not is_episode and (completion[cut] != SAMPLING.max_new_tokens).any():
        problems.append("rows that are not finished and shorter than max_new_tokens")
    if (batch["prompt_lengths"].values < 1).any() or (batch["tokens"].values < 0).any():
        problems.append("empty prompts or negative token ids")
    expect(
        not problems,
        sent=f"{SENT}, at most {SAMPLING.max_new_tokens} tokens",
        came=f"completions of {completion.tolist()} tokens, and {'; '.join(problems)}",
        remedy="pack each column by the same lengths, and stop at max_new_tokens",
    )


@rollout_check(
    "rollout.logprobs",
    Level.MUST,
    "logprobs: natural log, under the sampling distribution; policy_versions: policy_version that "
    "sampled the token.",
)
async def logprobs(subject: Subject) -> None:
    """Log-probs are finite and at most 0. They have one version if no new weights came."""
    batch = await _usual(subject)
    values, mask = batch["logprobs"].values, batch["loss_mask"].values
    versions = sorted(set(batch["policy_versions"].values[mask].tolist()))
    fine = bool(np.isfinite(values).all()) and not (values[mask] > ABOVE_ZERO).any()
    expect(
        fine and len(versions) == 1,
        sent=SENT,
        came=f"log-probs from {values.min():.4g} to {values.max():.4g}, versions {versions}",
        remedy="take the log-prob of each token after temperature, top-k and top-p, in float32",
    )


@rollout_check(
    "rollout.texts",
    Level.MUST,
    "prompt_text, completion_text, answer, metadata: text, UTF-8 of a row.",
)
async def texts(subject: Subject) -> None:
    """Half a character at the end of a completion is replaced, not sent."""
    batch = await _usual(subject)
    for name in ("prompt_text", "completion_text", "answer", "metadata"):
        try:
            batch[name].strings()
        except ValueError as error:
            raise BrokenContractError(
                sent=SENT,
                came=f"{name} that is no UTF-8 ({error})",
                remedy="replace bytes that are no UTF-8",
            ) from error


def _same_tokens(first: Columns, second: Columns) -> bool:
    one, other = first["tokens"], second["tokens"]
    same = one.lengths().tolist() == other.lengths().tolist()
    return same and bool((one.values == other.values).all())


@rollout_check(
    "rollout.seeds",
    Level.MUST,
    "Seeds derive from (run seed, step, prompt id, sample index): a repeat yields the same tokens.",
)
async def seeds(subject: Subject) -> None:
    """Asks again under another key of the same step: the seeds are the same."""
    first, again = [await _sample(subject) for _ in range(2)]
    expect(
        _same_tokens(first, again),
        sent=f"{SENT}, twice in one step under two keys",
        came="other tokens the second time",
        remedy="give each completion a generator of its own, seeded by these four",
    )
    elsewhere = await _sample(subject, step=2)
    expect(
        not _same_tokens(first, elsewhere),
        sent=f"{SENT}, in another step",
        came="the same tokens",
        remedy="let the seed depend on the step",
    )


@rollout_check(
    "rollout.slices",
    Level.SHOULD,
    "PromptSlice: positions in a data set; which slice a prompt stands in does not change its "
    "completions.",
)
async def slices(subject: Subject) -> None:
    """Asks for the last prompts only."""
    whole = await _sample(subject)
    part = await _sample(subject, start=1, count=NUM_PROMPTS - 1)
    rows_of_part = range(SAMPLING.samples_per_prompt, NUM_ROWS)
    expect(
        _same_tokens(whole.select(rows_of_part), part),
        sent=f"{SENT}, then all prompts but the first one",
        came="other completions of the same prompts",
        remedy="let no seed depend on the position within the request",
    )


@rollout_check("rollout.greedy", Level.MUST, "greedy: takes the likeliest token each time.")
async def greedy(subject: Subject) -> None:
    """Both samples of a prompt have the same tokens, in two steps."""
    first, again = [await _sample(subject, step=step, greedy=True) for step in (1, 2)]
    if ENVIRONMENT_REWARDS in first:
        raise NotApplicableError("an environment may answer differently each time")
    number = SAMPLING.samples_per_prompt
    twins = first.select(range(0, NUM_ROWS, number)), first.select(range(1, NUM_ROWS, number))
    expect(
        _same_tokens(first, again) and _same_tokens(*twins),
        sent=f"{SENT}, greedy, in two steps",
        came="other tokens the second time, or in the second sample",
        remedy="take the likeliest token, whatever the seed",
    )


@rollout_check(
    "rollout.blocks",
    Level.MUST,
    "block_rows: blocks are sent as soon as all their rows are finished, each block once, then one "
    "result over all rows. Block i holds rows i * block_rows and following of the result.",
)
async def blocks(subject: Subject) -> None:
    """The blocks hold the same rows as the result."""
    size = SAMPLING.samples_per_prompt
    events = await events_of(subject.generate(subject.key("compliance.blocks"), block_rows=size))
    sent = f"{SENT}, block_rows {size}"
    expect_progress_then_one_result(events, sent, ("progress", "block"))
    found = {event.block.index: event.block for event in events if event.HasField("block")}
    count = sum(event.HasField("block") for event in events)
    expect(
        sorted(found) == list(range(NUM_PROMPTS)) and count == NUM_PROMPTS,
        sent=sent,
        came=f"{count} blocks, of the indexes {sorted(found)}",
        remedy="send each block once, ahead of the result",
    )
    whole = await subject.rows(experience_in(result_in(events, sent), sent))
    for index, block in found.items():
        part = await subject.rows(block.experience)
        expect(
            _same_tokens(part, whole.select(range(index * size, (index + 1) * size))),
            sent=sent,
            came=f"block {index} with other rows than the result's",
            remedy="number the rows of a block from 0, and those of the result as without blocks",
        )


@rollout_check(
    "rollout.refusals",
    Level.MUST,
    "INVALID_ARGUMENT (SAMPLING_INVALID): a sampling field is out of range; (SPLIT_INVALID), "
    "(SLICE_INVALID): prompts are none.",
)
async def refusals(subject: Subject) -> None:
    """Each wrong request is refused with a text that names the fault."""
    for sent, reason, options in (
        ("temperature 0", "SAMPLING_INVALID", {"temperature": 0.0}),
        ("top_p 2", "SAMPLING_INVALID", {"top_p": 2.0}),
        ("max_new_tokens 0", "SAMPLING_INVALID", {"max_new_tokens": 0}),
        ("no prompts", "SLICE_INVALID", {"count": 0}),
        ("no split", "SPLIT_INVALID", {"split": rollout_pb2.SPLIT_UNSPECIFIED}),
    ):
        error = await subject.refused(
            events_of(subject.generate(subject.key(), **options)),
            f"Generate with {sent}",
            f"INVALID_ARGUMENT ({reason})",
            "refuse it and name the field",
        )
        expect(
            bool(error.message),
            sent=f"Generate with {sent}",
            came=f"a refusal without words: {shorten(error)}",
            remedy="name the field in the message",
        )
