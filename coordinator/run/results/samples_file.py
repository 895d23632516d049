"""samples.jsonl of a run: completions that outlive its store, for people."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rolemesh.coordinator.trackers.files import LinesOfSteps, whole_lines
from rolemesh.rpc.samples.sessions import session_facts, session_message
from rolemesh.v1 import coordinator_pb2

SAMPLES_FILE = "samples.jsonl"
"""In a run's folder: some completions of each step and of each evaluation, one a line."""

MAX_FILE_BYTES = 32 * 2**20
"""A file that has grown beyond it loses the older half of its lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptSample:
    """One line of samples.jsonl."""

    step: int
    """Step that trained on it; of a held-out one, steps made before it was sampled."""
    held_out: bool
    """Whether it answers a held-out prompt, of an evaluation."""
    row: int
    """Row of its batch."""
    prompt: str
    completion: str
    answer: str
    """Expected answer; empty where the data has none."""
    reward: float | None
    """None where it has none."""
    policy_version: int
    """Version of the weights that sampled its first token."""
    num_tokens: int
    """Tokens of the completion, at most 4,096 of which are counted."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Parts of its reward by "<source>/<part>"."""
    session: dict[str, Any] | None = None
    """Session of the agent that made it, with the names of SampledSession; None: no agent did."""
    images: list[dict[str, Any]] = field(default_factory=list)
    """Images of its prompt, with the names of SampledImage: their digests, and not the files."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values; images only where there are some."""
        plain = asdict(self)
        return plain if self.images else {k: v for k, v in plain.items() if k != "images"}

    def images_message(self) -> list[coordinator_pb2.SampledImage]:
        """Its images as they travel; ValueError or TypeError where they are none."""
        return [coordinator_pb2.SampledImage(**one) for one in self.images]


class SamplesFile:
    """Writes samples.jsonl. Owner: the coordinator's loop.

    Invariant: the file holds at most MAX_FILE_BYTES after a write, unless one write alone is more.
    """

    def __init__(self, directory: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        """Opens the file; what it holds stays.

        Args:
            directory: The run's folder.
            max_bytes: See MAX_FILE_BYTES.
        """
        self._path = directory / SAMPLES_FILE
        self._max_bytes = max_bytes
        self._lines = LinesOfSteps(self._path)

    def write(
        self, step: int, samples: Sequence[coordinator_pb2.Sample], *, is_held_out: bool
    ) -> None:
        """Appends samples of a step, or of the evaluation after it."""
        for sample in samples:
            self._lines.append(
                KeptSample(
                    step=step,
                    held_out=is_held_out,
                    row=sample.row,
                    prompt=sample.prompt,
                    completion=sample.completion,
                    answer=sample.answer,
                    # JSON has no NaN.
                    reward=sample.reward if math.isfinite(sample.reward) else None,
                    policy_version=sample.policy_version,
                    num_tokens=len(sample.token_ids),
                    reward_parts=dict(sample.reward_parts),
                    session=session_facts(sample.session) if sample.HasField("session") else None,
                    images=[
                        {"sha256": one.sha256, "num_bytes": one.num_bytes} for one in sample.images
                    ],
                ).to_dict()
            )
        self._lines.bound(self._max_bytes)

    def rewind(self, step: int) -> None:
        """Leaves out what belongs to steps after `step`: they will be made again."""
        self._lines.keep(lambda line: line["step"] <= step)

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


def read_samples(directory: Path) -> list[KeptSample]:
    """The samples of a run, also while it goes on, in the order in which they were written.

    An evaluation that was made again after a failure stands once.

    Raises:
        ValueError: A line is not one that a run writes.
    """
    path = directory / SAMPLES_FILE
    kept: dict[tuple[int, bool, int], KeptSample] = {}
    for number, text in whole_lines(path):
        try:
            line = KeptSample(**json.loads(text))
            if line.session is not None:
                session_message(line.session)
            line.images_message()
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(
                f"line {number} of {path} is no sample ({error}): the file was "
                "changed, or written by another version of rolemesh"
            ) from error
        kept[line.step, line.held_out, line.row] = line
    return list(kept.values())
