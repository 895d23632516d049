"""GB/s of a trainer's sleep and wake, of its publication, and of its cut."""

from __future__ import annotations

import os
import shutil
import time
from typing import Any

import torch
from minutes_tools import (
    IS_REHEARSAL,
    SHAPE,
    Found,
    make_trainer,
    rows_of,
    seconds_of,
    synchronize,
    update,
    use_gpu,
)

TIMES = 3
"""The first makes and locks host memory; cuts and publications have two places for it, which are
there from the third on."""


def memory(found: Found) -> None:
    """A trainer after a step."""
    device = use_gpu()
    trainer = make_trainer("fast")
    batch = rows_of([SHAPE.tokens // 8] * 4, [SHAPE.tokens // 8] * 4)
    update(trainer, batch)
    publication(found, trainer)
    cut(found, trainer, device)
    sleep(found, trainer, device)
    # It is what it was.
    update(trainer, batch)


def sleep(found: Found, trainer: Any, device: torch.device) -> None:
    """To host memory and back."""
    from rolemesh.engine.hardware.devices import free_bytes, give_back_memory

    if IS_REHEARSAL:
        found.unrehearsed("sleep", "on a CPU nothing has to leave")
        trainer.move_to(torch.device("cpu"))
        return
    told: dict[str, list[dict[str, Any]]] = {"sleep": [], "wake": []}
    for _ in range(TIMES):
        for name, target in (("sleep", torch.device("cpu")), ("wake", device)):
            give_back_memory(device)
            before, moved = free_bytes(device), 0
            synchronize()
            started = time.perf_counter()
            moved = trainer.move_to(target)
            synchronize()
            seconds = time.perf_counter() - started
            give_back_memory(device)
            told[name].append(
                {
                    "moved_bytes": moved,
                    "free_changed_by_bytes": free_bytes(device) - before,
                    "seconds": round(seconds, 4),
                    "gb_per_s": round(moved / seconds / 1e9, 3),
                }
            )
            found[name] = told[name]
    if told["sleep"][0]["free_changed_by_bytes"] < 0.9 * told["sleep"][0]["moved_bytes"]:
        raise RuntimeError("what sleeps stays on the device")


def publication(found: Found, trainer: Any) -> None:
    """Of the weights in bfloat16, against a copy of as many bytes to locked memory."""
    from rolemesh.engine.weights.exchanges.publication_memory import PublicationMemory
    from rolemesh.engine.weights.exchanges.published import Publication

    weights = dict(trainer.named_weights())
    layout = trainer.weights_layout.in_dtype("bfloat16")
    segments = PublicationMemory()
    told = []
    # As a service does: the one before it is let go when this one is there.
    newest: Publication | None = None
    for version in range(TIMES + 1):
        synchronize()
        started = time.perf_counter()
        published = Publication(layout, 0, weights, policy_version=version, memory=segments)
        seconds = time.perf_counter() - started
        if newest is not None:
            newest.close()
        newest = published
        rate = round(published.num_bytes / seconds / 1e9, 3)
        told.append({"seconds": round(seconds, 4), "gb_per_s": rate})
        found["publication"] = told
    num_bytes = published.num_bytes
    published.close()
    del published, newest
    segments.close()
    if IS_REHEARSAL:
        found.unrehearsed("pinned copy", "memory can be locked for a GPU alone")
        return
    rounded = torch.empty(num_bytes, dtype=torch.uint8, device=use_gpu())
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    times = [seconds_of(lambda: pinned.copy_(rounded, non_blocking=True)) for _ in range(TIMES)]
    found["pinned_copy_gb_per_s"] = round(num_bytes / min(times) / 1e9, 3)


def cut(found: Found, trainer: Any, device: torch.device) -> None:
    """Until the cut is whole; `call_s` is what the step waits for, before it may change weights."""
    from rolemesh.engine.train.cuts.slots import CutSlots
    from rolemesh.engine.transport.slots.slot_files import SlotOwner
    from rolemesh.engine.transport.slots.slots import remove_slots

    weights = sum(weight.nbytes for _, weight in trainer.named_weights())
    needed, room = 2 * 3 * weights, shutil.disk_usage("/dev/shm").free
    if room < 1.05 * needed:
        found["cut_skipped"] = f"/dev/shm has {room} bytes free, two slots take {needed}"
        return
    owner = SlotOwner(f"gpu-minutes-{os.getpid()}", "actor", 0, 1)
    slots = CutSlots(owner, trainer.mesh.layout.train.flag(), device)
    told = []
    try:
        for step in range(TIMES + 1):
            synchronize()
            started = time.perf_counter()
            num_bytes = trainer.save_cut(slots, step, {}, lambda *_: None)
            called = time.perf_counter() - started
            slots.settle()
            seconds = time.perf_counter() - started
            told.append(
                {
                    "bytes": num_bytes,
                    "call_s": round(called, 4),
                    "seconds": round(seconds, 4),
                    "gb_per_s": round(num_bytes / seconds / 1e9, 3),
                }
            )
            found["cut"] = told
        restored = seconds_of(lambda: trainer.restore_cut(slots, TIMES))
        found["restore"] = {
            "seconds": round(restored, 4),
            "gb_per_s": round(num_bytes / restored / 1e9, 3),
        }
    finally:
        slots.close()
        remove_slots(owner.run_id, owner.role)
