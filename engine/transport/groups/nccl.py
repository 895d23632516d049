"""Messages between GPUs over NCCL, through `cupy.cuda.nccl` with raw pointers and torch streams.

Calls only: what goes where and in which order is decided above. Not verified on a GPU yet; the
calls are held to NCCL's rules by a fake (tests/support/fake_nccl.py).
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from rolemesh.engine.transport.base import (
    Deadline,
    Exchange,
    Message,
    TransferFailedError,
    Transport,
)
from rolemesh.engine.transport.cuda_queue import DeviceQueue, Mark
from rolemesh.engine.transport.rendezvous import (
    OfferInvalidError,
    check_offers,
    decode_offer,
    encode_offer,
)

UNIQUE_ID_BYTES = 128
"""sizeof(ncclUniqueId)."""

_POLL_S = 1e-4
_REMEDY = "install rolemesh[gpu], or cupy and nvidia-nccl of the same CUDA version as torch"
_RESTART = "NCCL cannot take back what hangs in it: end this process and start the services again"


def load_nccl() -> Any:
    """The module `cupy.cuda.nccl`.

    Raises:
        OSError: Cupy, or NCCL in it, is not installed.
    """
    try:
        nccl = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise OSError(f"cupy's NCCL is not available ({error}): {_REMEDY}") from error
    # Without libnccl cupy has the module all the same, and its calls fail one by one: a rank would
    # notice only when the others wait for it.
    if not getattr(nccl, "available", True):
        raise OSError(f"cupy finds no libnccl: {_REMEDY}")
    return nccl


def decode_unique_id(text: str) -> bytes:
    """The unique id of a peer.

    Raises:
        OfferInvalidError: It is no hex of 128 bytes.
    """
    try:
        raw = bytes.fromhex(text)
    except ValueError as error:
        raise OfferInvalidError(f"NCCL's unique id is not hex: {error}") from error
    if len(raw) != UNIQUE_ID_BYTES:
        raise OfferInvalidError(f"NCCL's unique id has {len(raw)} bytes, not {UNIQUE_ID_BYTES}")
    return raw


class NcclTransport(Transport):
    """A rank's end of one NCCL communicator. Owned by the rank's compute thread.

    Every round is one group call: sends and receives of all peers progress together, so no order
    of peers can deadlock. NCCL has no deadlines, so calls and waits are bounded here: at the
    deadline the communicator is aborted. An aborted operation then ends without an error and with
    partial data, which is why the failure is looked up after each wait as well.

    Example::

        transport = NcclTransport(rank, world_size, queue=CudaQueue(device))
        transport.connect(offers_of_all_ranks, timeout_s=120)  # each rank's transport.offer
    """

    name = "NCCL"

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        queue: DeviceQueue,
        launch_timeout_s: float = 120.0,
        nccl: Any | None = None,
    ) -> None:
        """Loads NCCL; `connect` makes the communicator.

        Args:
            rank: This rank, with one device.
            world_size: Ranks in all.
            queue: The device, and where the transfers are queued.
            launch_timeout_s: Bound of the call that starts a round. It blocks while NCCL connects
                two ranks for the first time, until both are there.
            nccl: A stand-in for `cupy.cuda.nccl`.

        Raises:
            OSError: Cupy is not installed.
        """
        super().__init__(rank, world_size)
        self._nccl = load_nccl() if nccl is None else nccl
        self._queue = queue
        self._launch_timeout_s = launch_timeout_s
        self._communicator: Any = None
        self._lock = threading.Lock()
        # Bytes, since cupy 14.0.
        self._unique_id: bytes = self._nccl.get_unique_id() if rank == 0 else b""

    @property
    def offer(self) -> bytes:
        """NCCL's version, and of rank 0 the unique id."""
        version = int(self._nccl.get_version())
        return encode_offer("nccl", {"version": version, "unique_id": self._unique_id.hex()})

    def connect(self, offers: Sequence[bytes], *, timeout_s: float) -> None:
        """Makes the communicator. Every rank calls it.

        Args:
            offers: Of all ranks, by rank.
            timeout_s: Seconds within which all must have come.

        Raises:
            OfferInvalidError: NCCL's version differs between ranks, or an offer is unusable.
            TransferFailedError: NCCL failed, or a rank did not come: this process must end, since
                NCCL's initialization can neither be bounded nor taken back.
        """
        check_offers(offers, self.world_size)
        kinds: dict[str, type[str] | type[int]] = {"version": int, "unique_id": str}
        own = int(self._nccl.get_version())
        decoded = [decode_offer(blob, "nccl", kinds, rank=peer) for peer, blob in enumerate(offers)]
        # Checked before initialization: NCCL itself notices only after it has begun, and then the
        # other ranks hang.
        for peer, offer in enumerate(decoded):
            if offer["version"] != own:
                raise OfferInvalidError(
                    f"rank {peer} has NCCL {offer['version']}, rank {self.rank} has {own}: install "
                    "the same version on all ranks"
                )
        unique_id = decode_unique_id(decoded[0]["unique_id"])
        deadline = Deadline(timeout_s)
        outcome: dict[str, Any] = {}

        def initialize() -> None:
            try:
                self._queue.use_device()
                outcome["communicator"] = self._nccl.NcclCommunicator(
                    self.world_size, unique_id, self.rank
                )
            except RuntimeError as error:
                outcome["error"] = error

        thread = threading.Thread(target=initialize, name="rolemesh-nccl-init", daemon=True)
        thread.start()
        thread.join(deadline.remaining_s)
        if "communicator" in outcome:
            self._communicator = outcome["communicator"]
            return
        error = outcome.get("error")
        self._fail("it never connected")
        cause = "NCCL's initialization did not end in time" if error is None else str(error)
        raise self._failed(cause, None, "all ranks to connect", deadline) from error

    def abort(self) -> None:
        """Aborts the communicator; operations under way end with partial data."""
        super().abort()
        with self._lock:
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()

    def close(self) -> None:
        """Destroys the communicator; call it on all ranks."""
        self._fail("closed")
        with self._lock:
            communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()

    def _start(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str, is_control: bool
    ) -> Exchange:
        communicator = self._communicator
        if communicator is None:
            raise ValueError("the transport is not connected: call connect first")
        deadline = Deadline(self._launch_timeout_s)
        watchdog = threading.Timer(self._launch_timeout_s, self.abort)
        watchdog.daemon = True
        watchdog.start()
        try:
            self._queue.wait_for_caller()
            stream, byte = self._queue.pointer, self._nccl.NCCL_UINT8
            self._nccl.groupStart()
            try:
                for call, messages in ((communicator.send, sends), (communicator.recv, receives)):
                    for message in messages:
                        pointer, count = message.buffer.data_ptr(), message.buffer.numel()
                        call(pointer, count, byte, message.peer, stream)
            finally:
                self._nccl.groupEnd()
            mark = self._queue.mark()
        except RuntimeError as error:
            self.abort()
            raise self._failed(str(error), _only_peer(sends, receives), label, deadline) from error
        finally:
            watchdog.cancel()
        if self._failure:
            raise self._failed(
                "the round could not be started in time",
                _only_peer(sends, receives),
                label,
                deadline,
            )
        for message in sends:
            self._count_sent(message.buffer.numel(), is_control)
        return _NcclExchange(self, communicator, mark, sends, receives, label, is_control)

    def _failed(
        self, cause: str, peer: int | None, label: str, deadline: Deadline
    ) -> TransferFailedError:
        return self.failure(cause, peer, label, seconds=deadline.elapsed_s, remedy=_RESTART)


class _NcclExchange(Exchange):
    def __init__(
        self,
        transport: NcclTransport,
        communicator: Any,
        mark: Mark,
        sends: Sequence[Message],
        receives: Sequence[Message],
        label: str,
        is_control: bool,
    ) -> None:
        self._transport = transport
        self._communicator = communicator
        self._mark = mark
        # The device reads and writes the buffers until the mark: they are kept until then.
        self._sends = list(sends)
        self._receives = list(receives)
        self._label = label
        self._is_control = is_control
        self._is_done = False

    def wait(self, timeout_s: float) -> None:
        if self._is_done:
            return
        transport, deadline = self._transport, Deadline(timeout_s)
        cause = ""
        while not cause:
            if transport._failure:
                cause = f"the transport failed ({transport._failure}): the data is partial"
                break
            try:
                self._communicator.check_async_error()
            except RuntimeError as error:
                cause = f"NCCL reports {error}"
                break
            if self._mark.query():
                break
            if deadline.is_over:
                cause = "not all of it arrived in time"
                break
            time.sleep(_POLL_S)
        if not cause and transport._failure:
            # Aborted between the two questions: the mark was reached with partial data.
            cause = f"the transport failed ({transport._failure}): the data is partial"
        if cause:
            transport.abort()
            raise transport._failed(
                cause, _only_peer(self._sends, self._receives), self._label, deadline
            )
        for message in self._receives:
            transport._count_received(message.buffer.numel(), self._is_control)
        self._sends, self._receives, self._is_done = [], [], True


def _only_peer(sends: Sequence[Message], receives: Sequence[Message]) -> int | None:
    """The peer of a round with one; a group of several does not tell which one is late."""
    peers = {message.peer for message in (*sends, *receives)}
    return peers.pop() if len(peers) == 1 else None
