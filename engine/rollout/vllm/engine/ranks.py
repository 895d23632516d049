"""A vLLM engine as one of several ranks of a service.

Each rank has an engine of its own in its own process (vLLM's external launcher); those of one
generation replica add and gather over vLLM's tensor group, made inside the torch world that
`RankMesh.connect` made. vLLM divides that world into neighbours, which is why `HybridLayout`
numbers a replica's ranks next to each other there. Starting takes collectives over all ranks;
generation none beyond the replica.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from rolemesh.engine.layout.ranks import LayoutError
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rollout.vllm.engine.shared_memory import shared_memory_name

SHARED_MEMORY_NAME = "rolemesh_shared_memory_name"
"""Key in the engine's additional_config under which our CPU worker finds its name."""

logger = logging.getLogger(__name__)

_spoilt_by = ""
"""Why an engine of this process could not be ended in order; vLLM's allocator is the process's."""

_CPU_WORKER = "rolemesh.engine.rollout.vllm.engine.worker.NamedCpuWorker"


def check_generate_layout(mesh: RankMesh) -> None:
    """Raises LayoutError where vLLM cannot generate as the mesh's layout says."""
    stages = mesh.layout.generate.pp
    if stages > 1:
        raise LayoutError(
            f"generate.pp is {stages}: vLLM's external launcher samples with tensor slices only; "
            "give generate.pp 1"
        )


@contextmanager
def engine_start(mesh: RankMesh, device: torch.device) -> Iterator[dict[str, Any]]:
    """Surrounds the making of an engine; gives the arguments that make it one of several.

    All ranks of the mesh enter together.

    Args:
        mesh: Groups of this rank.
        device: On which the engine is to compute, a GPU with its index.

    Raises:
        ValueError: The rank is alone, and its GPU is not the first: vLLM would take that one.
    """
    if mesh.world.size == 1 and device.type == "cuda" and device.index != 0:
        raise ValueError(
            f"device is {device}, but an engine of one rank takes the first GPU that its process "
            "sees: show it no other one (CUDA_VISIBLE_DEVICES)"
        )
    with ExitStack() as stack:
        arguments: dict[str, Any] = {}
        if mesh.world.size > 1:
            stack.enter_context(launched_rank(mesh.torch_rank(mesh.rank), mesh.world.size, device))
            arguments["distributed_executor_backend"] = "external_launcher"
            arguments["tensor_parallel_size"] = mesh.generate_tp.size
        if mesh.generate_tp.size > 1 and _is_cpu():
            name = stack.enter_context(
                shared_memory_name(mesh.generate_tp, mesh.torch_rank(mesh.generate_tp.ranks[0]))
            )
            arguments["worker_cls"] = _CPU_WORKER
            arguments["additional_config"] = {SHARED_MEMORY_NAME: name}
        yield arguments


def check_groups(mesh: RankMesh) -> None:
    """Raises RuntimeError unless vLLM's slices are those of the layout, in its order.

    Weights are cut and delivered by the layout: another order would mix them up silently.
    """
    from vllm.distributed.parallel_state import get_tp_group

    expected = [mesh.torch_rank(rank) for rank in mesh.generate_tp.ranks]
    found = list(get_tp_group().ranks)
    if mesh.world.size > 1 and found != expected:
        raise RuntimeError(
            f"vLLM put torch ranks {found} together, but the layout's generation slices are "
            f"{expected}: its order of ranks has changed"
        )


def spare_the_world(engine: Any) -> None:
    """Takes from vLLM the right to end torch's world where a mesh made it.

    vLLM 0.32 ends it in every shutdown, also a world that it did not make, and shuts an engine down
    when the last reference to it goes. From here on only `end_engine` does.
    """
    engine.engine_core._finalizer.detach()


def wake_to_end(engine: Any) -> None:
    """Takes all memory of a sleeping engine again, so that it can be freed in order.

    Where there is no room for it, the engine is ended all the same, and `check_allocator` refuses
    the next one.
    """
    global _spoilt_by
    try:
        engine.wake_up()
    except RuntimeError as error:
        _spoilt_by = str(error)
        logger.warning("a sleeping vLLM engine is ended without room to wake it: %s", error)


def check_allocator() -> None:
    """Raises RuntimeError where vLLM's allocator of this process can make no further engine."""
    if _spoilt_by:
        raise RuntimeError(
            f"the engine before was ended asleep, since there was no room to wake it ({_spoilt_by})"
            ", and vLLM cannot allocate in this process any more: start the service again"
        )


def end_engine(engine: Any, *, world_is_ours: bool) -> None:
    """Shuts an engine down and destroys its process groups.

    Args:
        engine: VLLM's LLMEngine.
        world_is_ours: See `leave_groups`.
    """
    from vllm.v1.engine import core

    spare_the_world(engine)
    clean_up = core.cleanup_dist_env_and_memory
    core.cleanup_dist_env_and_memory = lambda: None
    try:
        engine.engine_core.engine_core.shutdown()
    finally:
        core.cleanup_dist_env_and_memory = clean_up
    leave_groups(world_is_ours=world_is_ours)


def leave_groups(*, world_is_ours: bool) -> None:
    """Destroys vLLM's process groups, so that a next engine can make its own.

    Args:
        world_is_ours: vLLM made torch's world, and it goes too. Otherwise a mesh did, which is
            still in use.
    """
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    if world_is_ours:
        parallel_state.destroy_distributed_environment()
    elif parallel_state._WORLD is not None:
        # What destroy_distributed_environment does, but for torch's world. Left alone it would
        # meet the next engine with groups of a world that may be gone by then.
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
        parallel_state._NODE_COUNT = None


@contextmanager
def launched_rank(torch_rank: int, world_size: int, device: torch.device) -> Iterator[None]:
    """Tells vLLM's external launcher which rank this is, and takes it back after the block.

    Args:
        torch_rank: Number of this rank in torch's world.
        world_size: Ranks in it.
        device: Of this rank. On GPUs vLLM 0.32 reads LOCAL_RANK as an index into what
            CUDA_VISIBLE_DEVICES shows, which is torch's index of the device, and makes it the
            thread's current one (vllm/v1/worker/gpu_worker.py, init_device).
    """
    local_rank = device.index if device.type == "cuda" else torch_rank
    values = {"RANK": torch_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
    # VLLM_DIST_IDENT is written by vLLM's CPU worker.
    before = {name: os.environ.get(name) for name in (*values, "VLLM_DIST_IDENT")}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
