"""experts.jsonl of a run: how often each expert of its mixtures was chosen in each step.

The line of a step is written before the step is committed: so no committed step lacks its line,
and a line without a commit is one of a step that will be made again, which replaces it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.dataflow.futures import Node
from rolemesh.coordinator.trackers.files import LinesOfSteps, whole_lines
from rolemesh.rpc.calls.expert_loads import Loads, checked_loads, loads_message, summed_loads
from rolemesh.v1 import coordinator_pb2, experience_pb2

EXPERTS_FILE = "experts.jsonl"
"""In a run's folder: loads of the experts of each step, one line a step."""

MAX_FILE_BYTES = 64 * 2**20
"""A file that has grown beyond it loses the older half of its lines. A step of 48 layers of 128
experts takes about 40 KB."""


def loads_of_step(step: int, nodes: Sequence[Node]) -> dict[str, dict[int, list[int]]]:
    """Loads by role of all updates of a step; roles whose model has no experts are left out.

    Raises:
        RunError: Two updates of a role told of different experts.
    """
    found = {}
    for role in sorted({node.role for node in nodes if node.expert_loads}):
        try:
            found[role] = summed_loads([node.expert_loads for node in nodes if node.role == role])
        except ValueError as error:
            raise RunError(
                f"step {step}: {role}: {error}: its services must train models of one form"
            ) from error
    return found


def loads_response(step: int, roles: Mapping[str, Loads]) -> coordinator_pb2.GetExpertLoadsResponse:
    """As the store has them, and as they are sent."""
    return coordinator_pb2.GetExpertLoadsResponse(
        step=step,
        roles=[
            coordinator_pb2.RoleLoads(role=role, layers=loads_message(loads))
            for role, loads in roles.items()
        ],
    )


class ExpertsFile:
    """Writes experts.jsonl. Owner: the coordinator's loop.

    Invariant: the file has at most one line a step, ascending, and at most MAX_FILE_BYTES after a
    write, unless the lines of one step alone are more. There is no file before the first line:
    most runs train no mixture.
    """

    def __init__(self, directory: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        """Prepares; what the file holds stays.

        Args:
            directory: The run's folder.
            max_bytes: See MAX_FILE_BYTES.
        """
        self._path = directory / EXPERTS_FILE
        self._max_bytes = max_bytes
        self._lines = LinesOfSteps(self._path) if self._path.is_file() else None
        newest = deque(whole_lines(self._path), maxlen=1)
        self._newest = int(json.loads(newest[0][1])["step"]) if newest else 0

    def write(self, step: int, roles: Mapping[str, Loads]) -> None:
        """Writes the line of a step, in the place of what earlier attempts at it have left."""
        self.rewind(step - 1)
        self._lines = self._lines or LinesOfSteps(self._path)
        told = {
            role: {"layers": list(loads), "choices": list(loads.values())}
            for role, loads in roles.items()
        }
        self._lines.append({"step": step, "roles": told})
        self._newest = step
        self._lines.bound(self._max_bytes)

    def rewind(self, step: int) -> None:
        """Leaves out what belongs to steps after `step`: they will be made again."""
        if self._lines is not None and self._newest > step:
            self._lines.keep(lambda line: line["step"] <= step)
            self._newest = step

    def close(self) -> None:
        """Closes the file."""
        if self._lines is not None:
            self._lines.close()


def read_expert_loads(
    directory: Path, keep: int | None = None
) -> list[coordinator_pb2.GetExpertLoadsResponse]:
    """Loads of the steps of a run, also while it goes on; none where it trains no mixture.

    Args:
        directory: The run's folder.
        keep: Newest steps that are read; None: all.

    Raises:
        ValueError: A line is not one that a run writes.
    """
    path = directory / EXPERTS_FILE
    found = []
    for number, text in deque(whole_lines(path), maxlen=keep):
        try:
            line = json.loads(text)
            roles = {role: _loads_of(told) for role, told in line["roles"].items()}
            found.append(loads_response(line["step"], roles))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"line {number} of {path} tells no loads of experts ({error}): the file was "
                "changed, or written by another version of rolemesh"
            ) from error
    return found


def _loads_of(told: Mapping[str, Any]) -> Loads:
    """Loads of a role, checked as those that a service tells."""
    return checked_loads(
        experience_pb2.LayerLoads(layer=layer, choices=choices)
        for layer, choices in zip(told["layers"], told["choices"], strict=True)
    )
