"""The copies that make a cut: at once on a CPU, and behind what the rank does next on a GPU."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from rolemesh.engine.hardware.cpu_threads import threads_for_each
from rolemesh.engine.hardware.pinned_memory import CopyStream

_LOG = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[str, int, int], None]
"""Is told a stage, bytes done and bytes in all."""


class CutCopyError(RuntimeError):
    """The copies of a cut failed; there is no cut of its step."""


class CutCopies:
    """Copies a rank's state into the memory of a slot, then says that the slot is whole.

    A GPU copies on a stream of its own, into memory that is locked, while the rank goes on: what
    only reads the state, such as generation, takes no notice. Whoever changes the state, or gives
    its memory back, calls `wait` first. Made and called by the compute thread, each method once.

    Invariant: the slot is not whole before all copies are there.
    """

    def __init__(
        self,
        step: int,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        finish: Callable[[], None],
        progress: Progress,
    ) -> None:
        """Prepares; copies nothing yet.

        Args:
            step: Of the cut.
            pairs: Place in host memory, and the tensor to copy there, on any device.
            finish: Says that the slot is whole.
            progress: Told of bytes while `make` copies; if it raises, there is no cut.
        """
        self._step = step
        self._pairs = pairs
        self._finish = finish
        self._progress = progress
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def make(self) -> None:
        """Copies at once."""
        tensors = [tensor for _, tensor in self._pairs]
        done, total = 0, sum(tensor.nbytes for tensor in tensors)
        with torch.no_grad(), threads_for_each(tensors, torch.device("cpu")):
            for place, tensor in self._pairs:
                self._progress("save cut", done, total)
                place.copy_(tensor)
                done += tensor.nbytes
        self._finish()

    def begin(self, device: torch.device) -> None:
        """Queues the copies of a GPU, behind all that the thread has queued there before."""
        stream = CopyStream(device)
        with torch.no_grad(), stream.copying():
            for place, tensor in self._pairs:
                if tensor.device == device:
                    place.copy_(tensor, non_blocking=True)
        queued = stream.mark()

        def end() -> None:
            try:
                # Such as moments that are kept on the host: the thread has time for them.
                with torch.no_grad():
                    for place, tensor in self._pairs:
                        if tensor.device != device:
                            place.copy_(tensor)
                queued.synchronize()
                self._finish()
            except BaseException as error:  # it is raised by `wait`
                self._error = error
                _LOG.error("the copies of the cut of step %d failed: %s", self._step, error)

        self._thread = threading.Thread(target=end, name="rolemesh-cut", daemon=True)
        self._thread.start()

    def wait(self) -> float:
        """Waits until the cut is whole.

        Returns:
            Seconds that it took.

        Raises:
            CutCopyError: It will not be.
        """
        assert self._thread is not None, "begin comes first"
        started = time.monotonic()
        self._thread.join()
        # Tensors of the state must not outlive it through these.
        self._pairs = ()
        if self._error is not None:
            raise CutCopyError(
                f"the state after step {self._step} could not be copied to shared memory: "
                f"{self._error}"
            ) from self._error
        return time.monotonic() - started
