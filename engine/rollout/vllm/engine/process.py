"""Setting up of this process for vLLM, and undoing of what vLLM changes in it.

vLLM shares the process with the trainer. Everything it takes from the environment is set here,
before its first import; everything it changes for the whole process is put back here.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch

WEIGHT_TRANSFER_BACKEND = "rolemesh"
"""Name of our weight-transfer engine in vLLM's registry."""

ENVIRONMENT = {
    # The engine runs in this process: weights are handed over by reference.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM otherwise pins OpenMP threads to cores by local rank, so that several ranks of one host
    # take the same cores, and the pins hold for the trainer as well.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Models come from folders, never from a hub.
    "HF_HUB_OFFLINE": "1",
    # No usage is reported to vLLM's authors.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Its log lines go to our handlers, which name role and rank.
    "VLLM_CONFIGURE_LOGGING": "0",
}
"""Variables that are set whatever they were: rolemesh relies on each."""

_NO_COMPILER = "eager"
"""Name of the back end of torch.compile that calls what it is given."""

_FIRST_COMPILED = "vllm.model_executor.layers.vocab_parallel_embedding"
"""A module that compiles a function when it is imported, and that every model of vLLM imports."""

_MAX_NUMA_NODES = 1024
"""What Linux is built with at most; get_mempolicy refuses a smaller mask."""


def prepare_environment(kv_cache_gib: int) -> None:
    """Sets what vLLM reads from the environment. Called before the first import of vllm.

    Args:
        kv_cache_gib: KV cache on a CPU device in whole GiB; without it vLLM takes a share of all
            memory.
    """
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gib)


def has_expandable_segments(environment: Mapping[str, str]) -> bool:
    """Whether torch's allocator on GPUs is told to use expandable segments.

    VLLM's custom all-reduce shares buffers of CUDA graphs by CUDA IPC, which such memory does not
    have: the process would end without a traceback (vllm-project/vllm issue 42609; its maintainers
    advise `disable_custom_all_reduce`, or to leave the segments out). Sleep mode by itself is no
    reason: vLLM 0.32 keeps graphs out of the memory that sleeps unless it is told to offload them,
    and then copies instead of sharing (their pull requests 45611, closed, and 45623).
    """
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return any("expandable_segments:true" in environment.get(name, "").lower() for name in names)


def leave_uncompiled() -> None:
    """Has vLLM evaluate on a CPU the small functions that it would compile with inductor.

    vLLM 0.32 compiles a few where they are defined, among them the mask of a vocabulary's slice
    (`get_masked_input_and_mask`). That needs a C++ compiler at run time. Worse, inductor of torch
    2.13 finds code again by what is computed, and not by the CPU's vectors: what it wrote for
    AVX-512 is used where AVX2 is all there is, half of each vector is then never written, and a
    slice looks up tokens that are none. Plain evaluation knows no such cache.

    Called after `prepare_environment` and before any other import of vLLM: modules read the setting
    when they are imported.

    Raises:
        RuntimeError: One of them was imported before.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if not current_platform.is_cpu() or platform.simple_compile_backend == _NO_COMPILER:
        return
    if _FIRST_COMPILED in sys.modules:
        raise RuntimeError(
            f"{_FIRST_COMPILED} was imported before a vLLM back end was made, and is compiled with "
            f"{platform.simple_compile_backend}, which may give other tokens on this CPU: import "
            "vllm after the back end, or call leave_uncompiled of "
            "rolemesh.engine.rollout.vllm.engine.process first"
        )
    platform.simple_compile_backend = _NO_COMPILER


@cache
def prepare_vllm() -> None:
    """Settles what vLLM keeps once a process: weight engine, loader, kernels, log levels.

    Called after `leave_uncompiled` and before the first engine.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from rolemesh.engine.rollout.vllm.engine.loader import register_rounding_loader

    register_rounding_loader()
    if current_platform.is_cpu():
        from rolemesh.engine.rollout.vllm.engine.norms_on_cpu import register_norms
        from rolemesh.engine.rollout.vllm.weights.one_slot import serve_one_slot

        register_norms()
        serve_one_slot()
    WeightTransferEngineFactory.register_engine(
        WEIGHT_TRANSFER_BACKEND,
        "rolemesh.engine.rollout.vllm.weights.weights",
        "InProcessWeightEngine",
    )
    _leave_classes_alone()
    # It warns at each update that a tied head "failed to load". Completeness is checked by us,
    # and more strictly.
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
    # It warns at each start that the interface of `shared_prompts.py` may change; vLLM is pinned.
    logging.getLogger("vllm.distributed.kv_transfer.kv_connector.v1.base").setLevel(logging.ERROR)
    # It warns for each parameter that float32 weights meet a bfloat16 sampler: that is the cast
    # we want.
    logging.getLogger("vllm.model_executor.models.utils").setLevel(logging.ERROR)


def _leave_classes_alone() -> None:
    """Keeps vLLM from changing the classes of transformers, which the trainer's models have, too.

    A model for which vLLM 0.32 has no class of its own (OLMo 2 and 3, SmolLM3) is transformers',
    and vLLM decorates its class for torch.compile: every other model of that class in the process,
    also one that is there already, then fails in its first pass. Without it vLLM computes such
    models uncompiled.
    """
    from vllm.model_executor.models.transformers.base import Base

    def leave_alone(self: object, **_: object) -> None: ...

    Base._decorate_cls_for_torch_compile = leave_alone


@contextmanager
def untouched_process() -> Iterator[None]:
    """Puts back what vLLM's start changes for the whole process.

    Measured with vLLM 0.32: its CPU worker replaces `torch.set_num_threads` by a function that
    does nothing and binds all memory of this thread strictly to one NUMA node, its GPU worker
    lowers torch's threads to one and takes cuDNN's attention away, and both seed the global random
    generators. Any of them would slow the trainer down or change what it draws.
    """
    has_cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with _own_memory_policy(), own_random_state():
            yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn_attention)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        if affinity is not None and os.sched_getaffinity(0) != affinity:
            os.sched_setaffinity(0, affinity)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def own_random_state() -> Iterator[None]:
    """Lets the block draw from torch's global generators without moving them for the trainer.

    Each request has a generator of its own; vLLM draws from the global one all the same, once a
    step, and throws the numbers away.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def _own_memory_policy() -> Iterator[None]:
    """Puts this thread's NUMA memory policy back after the block."""
    try:
        numa = ctypes.CDLL("libnuma.so.1", use_errno=True)
    except OSError:
        # vLLM's CPU build cannot be loaded without this library, and only it sets a policy.
        yield
        return
    mode = ctypes.c_int()
    nodes = (ctypes.c_ulong * (_MAX_NUMA_NODES // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    limit = ctypes.c_ulong(_MAX_NUMA_NODES)
    # Containers may forbid both calls; then vLLM could not change the policy either.
    is_known = numa.get_mempolicy(ctypes.byref(mode), nodes, limit, None, ctypes.c_ulong(0)) == 0
    try:
        yield
    finally:
        if is_known and numa.set_mempolicy(mode, nodes, limit) != 0:
            raise OSError(ctypes.get_errno(), "the NUMA memory policy cannot be put back")
