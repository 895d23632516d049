"""Peak of torch's CPU allocator, from its own reports: no code of the engine counts."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocator_peak(work: Callable[[], None]) -> int:
    """Most bytes that tensors made by some work held at once, on all threads.

    Every allocation and release of the allocator is an event of torch's profiler; what a kernel
    takes for itself is among them.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    kineto = profiler.profiler
    assert kineto is not None
    events = [
        (event.start_ns(), event.nbytes())
        for event in kineto.kineto_results.events()
        if event.name() == "[memory]"
    ]
    assert events, "the profiler reported no allocation"
    held = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        held += size
        peak = max(peak, held)
    return peak
