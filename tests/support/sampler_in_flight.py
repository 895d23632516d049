"""Updates in the middle of the generations of several vLLM ranks: what each rank saw."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from support.in_flight_checks import at_steps

from rolemesh.engine.layout.boxes import generate_layout, whole_layout
from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.base import RolloutBackend
from rolemesh.engine.rollout.model_folder import WeightsStaleError
from rolemesh.engine.rollout.requests import RolloutRequest, RolloutTrajectory
from rolemesh.engine.specs import SamplingSpec
from rolemesh.engine.weights.exchanges.published import plan_taking
from rolemesh.services.rollout.deliveries import Deliveries, Delivery
from rolemesh.services.runtime.experience.published_weights import FetchedBoxes

ARRIVALS = (3, 8)
"""Decoding steps before which ranks 0 and 1 have fetched; both take the weights before the later.
"""
OLD, NEW = 10, 11
"""Versions before and after the update."""

Weights = Mapping[str, torch.Tensor]


@dataclass
class InFlight:
    """What a rank saw."""

    taken: list[RolloutTrajectory]
    """Of a generation into which version NEW came."""
    broken: str
    """Error of the generation in which rank 1 could not take the weights."""
    version_after: int
    """Of the back end, after it."""
    refusals: list[str]
    """Errors of generations that begin after it, and after an update that rank 1 could not fetch.
    """
    errors: list[str]
    """That the callers of these two updates got."""
    healed: list[RolloutTrajectory]
    """With the folder's weights again, which came after the failure."""
    kept: list[RolloutTrajectory]
    """Of the generation in which rank 1 could not fetch."""


def other_weights(weights: Weights) -> dict[str, torch.Tensor]:
    """Weights of the same model, each far from what it was."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: weight + 0.05 * torch.randn(weight.shape, generator=generator)
        for name, weight in weights.items()
    }


def continuations(
    requests: Sequence[RolloutRequest], taken: Sequence[RolloutTrajectory], num_tokens: int
) -> list[RolloutRequest]:
    """Requests whose prompts are what each row had when the weights came."""
    by_row = {request.row: request for request in requests}
    return [
        replace(
            by_row[one.row],
            prompt_tokens=[
                *by_row[one.row].prompt_tokens,
                *one.completion_tokens[: max(ARRIVALS)],
            ],
            max_new_tokens=num_tokens - max(ARRIVALS),
        )
        for one in taken
        if len(one.completion_tokens) > max(ARRIVALS)
    ]


class _Vanished(list[torch.Tensor]):
    """Boxes that can no longer be read."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        raise OSError("the publisher's memory is gone")


def delivery(mesh: RankMesh, folder: Path, weights: Weights, version: int) -> Delivery:
    """A rank's part of whole weights, as it arrives from one publisher."""
    shape = DecoderShape.from_config(json.loads((folder / "config.json").read_text()))
    source = whole_layout(shape.manifest("float32")).in_dtype("float32")
    taking = plan_taking(source, generate_layout(shape, mesh.layout, "float32"), mesh.rank)
    boxes = [
        weights[copy.parameter][tuple(slice(*ends) for ends in copy.box)]
        for copy in taking.copies[0]
    ]
    return Delivery(
        version, taking, {0: FetchedBoxes(boxes, "shm", sum(box.nbytes for box in boxes))}
    )


def in_flight_story(
    backend: RolloutBackend,
    mesh: RankMesh,
    folder: Path,
    weights: Weights,
    requests: Sequence[RolloutRequest],
    sampling: SamplingSpec,
) -> InFlight:
    """One update that all ranks take, one that rank 1 cannot take, one that it cannot fetch."""
    deliveries = Deliveries(backend, mesh, are_shards=True)
    others = other_weights(weights)
    is_first = mesh.rank == 0

    def bring(arriving: Delivery, step: int) -> None:
        hook = at_steps({step: lambda: deliveries.put(arriving)})

        def between_steps() -> None:
            hook()
            deliveries.look()

        backend.between_steps = between_steps

    def sampled() -> list[RolloutTrajectory]:
        return list(backend.generate(requests, sampling))

    deliveries.load(delivery(mesh, folder, others, OLD))
    bring(delivery(mesh, folder, weights, NEW), ARRIVALS[mesh.rank])
    taken = sampled()

    lost = delivery(mesh, folder, others, 12)
    if not is_first:
        lost.fetched[0] = replace(lost.fetched[0], boxes=_Vanished())
    bring(lost, 5)
    broken = _error_of(sampled)
    version_after = backend.policy_version
    refusals = [_error_of(deliveries.check)]
    deliveries.load(delivery(mesh, folder, weights, 13))
    deliveries.check()
    healed = sampled()

    unfetched = delivery(mesh, folder, others, 14)
    if not is_first:
        unfetched = Delivery(14, error=OSError("the publisher does not answer"))
    bring(unfetched, 5)
    kept = sampled()
    refusals.append(_error_of(deliveries.check))
    backend.between_steps = None
    return InFlight(
        taken=taken,
        broken=broken,
        version_after=version_after,
        refusals=refusals,
        errors=[str(one.loaded.exception(timeout=0)) for one in (lost, unfetched)],
        healed=healed,
        kept=kept,
    )


def _error_of(function: Callable[[], object]) -> str:
    try:
        function()
    except WeightsStaleError as error:
        return str(error)
    return ""
