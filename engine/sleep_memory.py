"""Host memory in which the tensors of a role lie while it sleeps and others have its GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rolemesh.engine.hardware.pinned_memory import CopyStream, PinnedMemory
from rolemesh.engine.parallel.data_parallel import gather_no_longer, local_part


class SleepMemory:
    """Takes tensors from a GPU and gives them back, bit for bit. Owned by the compute thread.

    The host memory is kept while the role is awake: it is as large as what slept, and locked.

    Invariant: values are where they are said to be when a call returns.

    Example::

        memory = SleepMemory()
        asleep = memory.to_host([weight])
        (weight,) = memory.to_device(asleep, torch.device("cuda", 0))
    """

    def __init__(self) -> None:
        """Takes no memory yet."""
        self._memory: PinnedMemory | None = None
        self._is_full = False

    def move(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Copies tensors to where they are not: to host memory, or to a GPU."""
        return self.to_host(tensors) if device.type == "cpu" else self.to_device(tensors, device)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies tensors of a GPU, always the same one, into host memory."""
        if self._is_full:
            # What sleeps there already stays as it is.
            return [tensor.cpu() for tensor in tensors]
        if self._memory is None:
            self._memory = PinnedMemory(tensors[0].device)
        places = self._memory.places(tensors)
        _copy(places, tensors, tensors[0].device)
        self._is_full = True
        return places

    def to_device(
        self, tensors: Sequence[torch.Tensor], device: torch.device
    ) -> list[torch.Tensor]:
        """Copies tensors of host memory, whether `to_host` gave them or not, to a GPU."""
        # Made on the thread's own stream: there they are used, and their memory is used again.
        places = [torch.empty_like(tensor, device=device) for tensor in tensors]
        _copy(places, tensors, device)
        self._is_full = False
        return places


def _copy(
    places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], device: torch.device
) -> None:
    stream = CopyStream(device)
    with torch.no_grad(), stream.copying():
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor, non_blocking=True)
    stream.synchronize()


def move_module(module: nn.Module, device: torch.device, memory: SleepMemory) -> int:
    """Moves parameters (cut ones too) and buffers, between a GPU and host memory.

    Args:
        module: Parameters stay the same objects.
        device: Where they are to be: a GPU, or the CPU.
        memory: Of this module alone.

    Returns:
        Bytes of this rank that changed places; 0 when they were there already.
    """
    for part in module.modules():
        # Else a whole parameter may stand where its part is.
        gather_no_longer(part)
    tensors = {id(one): one for one in (*module.parameters(), *module.buffers())}
    elsewhere = [one for one in tensors.values() if one.device != device]
    if not elsewhere:
        return 0
    parts = [local_part(one.detach()) for one in elsewhere]
    moved = memory.move(parts, device)
    replace_tensors(module, dict(zip(map(id, elsewhere), moved, strict=True)), device)
    return sum(part.nbytes for part in parts)


def replace_tensors(
    module: nn.Module, moved: dict[int, torch.Tensor], device: torch.device
) -> None:
    """Has parameters and buffers lie in other memory, where they have been copied to.

    Args:
        module: The tied parameters of which stay tied.
        moved: The new memory (of a cut parameter, of its part) by the id of the tensor.
        device: Of the new memory; what is not in `moved` goes there too.
    """

    def new(tensor: torch.Tensor) -> torch.Tensor:
        part = moved.get(id(tensor))
        if part is None:
            return tensor.to(device)
        if isinstance(tensor, DTensor):
            # As FSDP2 makes them. DTensor.from_local would move the part to the mesh's kind of
            # device.
            return DTensor(  # type: ignore[no-untyped-call]
                part, tensor._spec, requires_grad=tensor.requires_grad
            )
        return part

    module._apply(new)  # type: ignore[no-untyped-call]
