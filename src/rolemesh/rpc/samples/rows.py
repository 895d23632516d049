"""Rows of a batch for people: fetched from where they are held, as messages of bounded size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rolemesh.rpc.channel import MeshChannel
from rolemesh.rpc.experience.column_fetch import fetch_columns
from rolemesh.rpc.experience.columns import Columns
from rolemesh.rpc.experience.references import names_of
from rolemesh.rpc.samples.images import IMAGES, RowOfImages, fetch_images
from rolemesh.rpc.samples.sessions import SESSION, read_session
from rolemesh.v1 import coordinator_pb2, experience_pb2

PARTS = "rewards/parts"
"""Column of a text a row: a JSON object of the parts of its reward."""

COLUMNS = (
    "tokens",
    "prompt_lengths",
    "logprobs",
    "loss_mask",
    "policy_versions",
    "prompt_text",
    "completion_text",
    "answer",
    "rewards",
    PARTS,
    "advantages",
    SESSION,
)
"""Columns that are fetched where the experience has them."""

TRAJECTORY = ("prompt_ids", "sample_indexes")
"""Columns that are equal in the rows of one trajectory. Fetched of all rows where there are
sessions, to take whole ones."""

MAX_TEXT_BYTES = 8 * 2**10
"""A longer text is cut."""

MAX_TOKENS = 4096
"""Of a longer completion the first tokens are kept."""

MAX_FETCHED_BYTES = 16 * 2**20


async def fetch_samples(
    channel_to: Callable[[str], MeshChannel],
    reference: experience_pb2.ExperienceRef,
    max_rows: int,
    *,
    timeout_s: float | None = None,
    with_images: bool = True,
) -> list[coordinator_pb2.Sample]:
    """Some rows of a batch, spread evenly over it. Of agents all rows of some trajectories.

    Args:
        channel_to: The channel to an address "host:port".
        reference: The batch, at least with tokens and prompt_lengths.
        max_rows: Most rows, >= 1.
        timeout_s: Longest time of each call; None: the method's.
        with_images: Whether images of prompts are told of, where there are some.

    Raises:
        RolemeshError: As fetch_columns does.
        ValueError: Parts of rewards, what is told of a session, or images are none.
    """
    held = set(names_of(reference))
    number = min(max_rows, reference.num_rows)
    rows = [place * reference.num_rows // number for place in range(number)]
    names = [name for name in COLUMNS if name in held]
    if held >= {SESSION, *TRAJECTORY}:
        keys = await fetch_columns(
            channel_to,
            reference,
            TRAJECTORY,
            max_bytes=MAX_FETCHED_BYTES,
            timeout_s=timeout_s,
        )
        rows = rows_of_whole_trajectories(
            list(zip(*(keys[name].values.tolist() for name in TRAJECTORY), strict=True)), max_rows
        )
        names += TRAJECTORY
    columns = await fetch_columns(
        channel_to,
        reference,
        names,
        rows,
        max_bytes=MAX_FETCHED_BYTES,
        timeout_s=timeout_s,
    )
    images: Sequence[RowOfImages] = ()
    if with_images and IMAGES in held:
        images = await fetch_images(channel_to, reference, rows, timeout_s=timeout_s)
    return to_samples(columns, rows, images)


def rows_of_whole_trajectories(keys: Sequence[tuple[int, int]], max_rows: int) -> list[int]:
    """Rows of some trajectories, spread evenly over the batch; all rows of each.

    Args:
        keys: What is equal in the rows of one trajectory, of each row.
        max_rows: Most rows, >= 1. If one trajectory alone has more, its first ones.

    Example: keys a a b c c and 3 rows give a a b; with 2 rows, a a.
    """
    members: dict[tuple[int, int], list[int]] = {}
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    trajectories = list(members.values())
    for number in range(min(max_rows, len(trajectories)), 0, -1):
        places = range(number)
        chosen = [trajectories[place * len(trajectories) // number] for place in places]
        if sum(map(len, chosen)) <= max_rows:
            return sorted(row for rows in chosen for row in rows)
    return trajectories[0][:max_rows]


def to_samples(
    columns: Columns, rows: Sequence[int], images: Sequence[RowOfImages] = ()
) -> list[coordinator_pb2.Sample]:
    """Fetched columns as messages of bounded size; fields of missing columns stay empty.

    Args:
        columns: Some of COLUMNS, at least tokens and prompt_lengths.
        rows: Which rows of the batch these are.
        images: Those of each; empty: none has any.

    Raises:
        ValueError: Parts of rewards are no object of numbers, or what is told of a session is not
            as rollout.proto says; names the row.
    """
    values = {name: column.rows() for name, column in columns.items()}

    def text(name: str, place: int) -> str:
        if name not in values:
            return ""
        return values[name][place][:MAX_TEXT_BYTES].tobytes().decode(errors="ignore")

    def numbers(name: str, place: int) -> list[float]:
        return values[name][place][:MAX_TOKENS].tolist() if name in values else []

    samples = []
    for place, row in enumerate(rows):
        prompt_length = int(values["prompt_lengths"][place][0])
        completion = values["tokens"][place][prompt_length : prompt_length + MAX_TOKENS]
        versions = values.get("policy_versions")
        shown = images[place] if images else RowOfImages()
        samples.append(
            coordinator_pb2.Sample(
                row=row,
                prompt=text("prompt_text", place),
                completion=text("completion_text", place),
                answer=text("answer", place),
                reward=float(values["rewards"][place][0]) if "rewards" in values else np.nan,
                policy_version=int(versions[place][0]) if versions and len(versions[place]) else 0,
                token_ids=completion.tolist(),
                logprobs=numbers("logprobs", place),
                loss_mask=[bool(value) for value in numbers("loss_mask", place)],
                advantages=numbers("advantages", place),
                reward_parts=_parts(values[PARTS][place], row) if PARTS in values else {},
                session=_session(values, place, row),
                images=shown.images,
                has_large_images=shown.are_large,
            )
        )
    return samples


def _session(
    values: Mapping[str, Sequence[np.ndarray[Any, Any]]], place: int, row: int
) -> coordinator_pb2.SampledSession | None:
    if not values.keys() >= {SESSION, *TRAJECTORY}:
        return None
    prompt_id, sample_index = (int(values[name][place][0]) for name in TRAJECTORY)
    try:
        return read_session(values[SESSION][place].tobytes(), prompt_id, sample_index)
    except ValueError as error:
        raise ValueError(f"column {SESSION} of row {row}: {error}") from error


def _parts(encoded: np.ndarray[Any, Any], row: int) -> dict[str, float]:
    try:
        found = json.loads(encoded.tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"column {PARTS} of row {row} is no JSON ({error})") from error
    if not isinstance(found, dict) or not all(
        type(part) in (int, float) and math.isfinite(part) for part in found.values()
    ):
        raise ValueError(f"column {PARTS} of row {row} is no object of finite numbers")
    return found
