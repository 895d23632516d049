"""Last checkpoint of a run that has failed: its newest step, if its trained roles are healthy."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rolemesh.coordinator.dataflow.errors import RunError
from rolemesh.coordinator.run.attempts.attempt import Attempt
from rolemesh.coordinator.run.parts import RunParts
from rolemesh.coordinator.run.services.lost_services import MEET_AGAIN_DEADLINE_S, LostServices
from rolemesh.coordinator.run.steps.training import TrainingLoop
from rolemesh.rpc.errors import RolemeshError

LAST_CHECKPOINT_DEADLINE_S = 600.0
"""Longest time that a run which has failed spends on saving what its services hold."""


async def save_last(parts: RunParts, attempt: Attempt, lost: LostServices) -> None:
    """Saves the newest step of a run, unless that was done, and tells how the run can go on.

    Args:
        parts: Of the run.
        attempt: The one that has failed; it goes on under a newer epoch.
        lost: Services that are gone.

    Raises:
        StateStoreError: The store failed, or another coordinator has taken the run over.
    """
    step, tell = parts.progress.step, parts.observer.on_event
    assert isinstance(attempt.loop, TrainingLoop)
    if step == 0:
        return
    goes_on = f"`rolemesh train --resume {parts.directory}` goes on from"
    committed = attempt.loop.checkpoints.committed()
    if step in committed:
        tell(f"step {step} is saved as a checkpoint; {goes_on} it")
        return
    trained = [known.service for known in attempt.mesh.trained]
    gone = sorted(lost.names.keys() & set(trained))
    if gone:
        tell(
            f"step {step} was not saved as a checkpoint, since {', '.join(gone)} is gone; "
            f"{goes_on} what is left"
        )
        return
    # Which role of a pool is awake is not known any more, so all of them take part.
    services = [
        service
        for service in parts.services
        if service in trained or (parts.recipe.sleeps(service) and service not in lost.names)
    ]
    epoch = await parts.store.next_epoch(parts.run_id, led=attempt.journal.epoch)
    saver = Attempt(replace(parts, services=services), epoch, lost.addresses)
    try:
        async with asyncio.timeout(LAST_CHECKPOINT_DEADLINE_S):
            saved, folder = await saver.save_last(dict.fromkeys(services, MEET_AGAIN_DEADLINE_S))
        tell(f"step {saved} was saved before the end: {folder}; {goes_on} it")
    except (RunError, RolemeshError, TimeoutError) as error:
        why = str(error) or f"not within {LAST_CHECKPOINT_DEADLINE_S:.0f} s"
        older = f"; {goes_on} what is left" if committed else ""
        tell(f"step {step} could not be saved as a checkpoint: {why}{older}")
    finally:
        await saver.mesh.close()
        # Services are given back under the newest epoch.
        parts.progress.epoch = attempt.journal.epoch = epoch
        attempt.epoch = None if attempt.epoch is None else epoch
        parts.events.epoch = attempt.epoch
