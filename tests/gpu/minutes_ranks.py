"""Ranks that exchange bytes, on one device or between several.

The functions of ranks stand here and not in the script that runs the parts: they travel to other
processes by the name of their module, which `__main__` is not.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from minutes_tools import IS_REHEARSAL, Found, Skip

MiB = 1 << 20
TIMEOUT_S = 100.0


def ranks(found: Found) -> None:
    """Two ranks on one device: torch's NCCL, weights between ranks, weights between services."""
    if IS_REHEARSAL:
        found.unrehearsed("NCCL and CUDA IPC", "they are a GPU's: gloo and host memory instead")
    exchanges(found, 2)


def several_gpus(found: Found) -> None:
    """The same between all GPUs, each with a rank."""
    count = torch.cuda.device_count()
    if count < 2:
        raise Skip(f"there is {count} GPU" if count else "there is no GPU")
    exchanges(found, count)


def exchanges(found: Found, world: int) -> None:
    """All of them in the same processes; a failure is told when the others have been made too."""
    from support.rank_processes import RankPool

    found["ranks"], found["gpus"] = world, torch.cuda.device_count()
    failed = []
    started = time.perf_counter()
    with RankPool(world) as pool:
        pool.run(_ready, world, timeout_s=TIMEOUT_S)
        found["start_s"] = round(time.perf_counter() - started, 1)
        for function in (_all_reduce, exchanged_weights, given_weights):
            name = function.__name__.lstrip("_")
            try:
                found[name] = pool.run(function, world, timeout_s=TIMEOUT_S)[-1]
            except AssertionError as error:
                found[name] = f"failed: {error}"
                failed.append(name)
    if failed:
        raise RuntimeError(f"{', '.join(failed)} failed")


def _ready(at: Any) -> str:
    return str(_rank_device(at))


def _rank_device(at: Any) -> torch.device:
    if IS_REHEARSAL:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    device = torch.device("cuda", at.rank % count)
    torch.cuda.set_device(device)
    if at.world_size > count:
        # NCCL refuses two ranks of one host on one device, and takes them for two hosts then; our
        # own check of the devices is told by NCCL's variable of 2.30.
        os.environ["NCCL_HOSTID"] = f"rolemesh-rank-{at.rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return device


def _all_reduce(at: Any) -> dict[str, float]:
    import torch.distributed as dist

    from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout

    device = _rank_device(at)
    layout = HybridLayout(TrainLayout(dp=at.world_size))
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    with at.connect(layout, backend=backend, timeout_s=60.0):
        values = torch.ones((1 if IS_REHEARSAL else 256) * MiB // 4, device=device)
        dist.all_reduce(values)
        # Also the end of what was only queued.
        assert float(values[-1]) == at.world_size
        started = time.perf_counter()
        for _ in range(5):
            dist.all_reduce(values)
        float(values[-1])
        seconds = (time.perf_counter() - started) / 5
    # Each rank sends and receives 2 (n - 1) / n of the bytes.
    moved = values.nbytes * 2 * (at.world_size - 1) / at.world_size
    return {
        "bytes": values.nbytes,
        "seconds": round(seconds, 5),
        "bus_gb_per_s": round(moved / seconds / 1e9, 3),
    }


def exchanged_weights(at: Any) -> dict[str, Any]:
    """From each rank to each other one, as weights travel; the name of their transport."""
    from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
    from rolemesh.engine.transport.base import Message
    from rolemesh.engine.transport.selection import make_transport

    device = _rank_device(at)
    layout = HybridLayout(TrainLayout(dp=at.world_size))
    size = MiB if IS_REHEARSAL else 256 * MiB
    with at.connect(layout, timeout_s=60.0) as mesh, make_transport(mesh, device) as transport:
        peers = [rank for rank in range(at.world_size) if rank != at.rank]
        ours = torch.full((size,), at.rank, dtype=torch.uint8, device=device)
        theirs = {peer: torch.full_like(ours, 255) for peer in peers}
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            transport.exchange(
                [Message(peer, ours) for peer in peers],
                [Message(peer, theirs[peer]) for peer in peers],
            ).wait(60.0)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        for peer in peers:
            assert bool((theirs[peer] == peer).all()), f"rank {peer} sent other bytes"
        return {
            "transport": transport.name,
            "gb_per_s": round(len(peers) * size / min(seconds) / 1e9, 3),
        }


def given_weights(at: Any, layers: int = 1 if IS_REHEARSAL else 8) -> dict[str, Any]:
    """The first half of the ranks sends weights to the others, as an actor to a rollout service.

    GB/s are those that this rank takes, 0 for one that gives. The decoder has 64 MiB a layer, in
    bfloat16; half of the givers' time is the cast from float32.
    """
    from support.planned_bytes import planned_received

    from rolemesh.engine.layout.families import DecoderShape
    from rolemesh.engine.layout.ranks import TrainLayout
    from rolemesh.engine.weights.exchanges.exchange import ExchangeEnd, exchange_plan

    device = _rank_device(at)
    givers = at.world_size // 2
    takers = at.world_size - givers
    shape = DecoderShape.from_config(
        {
            "model_type": "llama",
            "num_hidden_layers": layers,
            "hidden_size": 1024,
            "intermediate_size": 9600,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 64,
            "vocab_size": 1024,
            "tie_word_embeddings": True,
        }
    )
    plan = exchange_plan(
        shape.manifest("float32"),
        shape,
        TrainLayout(dp=givers, fsdp=givers),
        TrainLayout(dp=takers),
        "bfloat16",
    )
    held = {
        name: torch.full(sizes, 0.5 + at.rank, device=device)
        for name, sizes in plan.source.shard(at.rank).shapes.items()
    }
    with ExchangeEnd(plan, at.rank, device) as end:
        end.connect(at.tell(end.offer, "services"))
        seconds = []
        for version in range(4):
            started = time.perf_counter()
            if at.rank < givers:
                end.send(held, policy_version=version)
                continue
            tensors = end.receive(policy_version=version)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            for name, tensor in tensors:
                assert bool((tensor % 1 == 0.5).all()), f"{name} holds what was not sent"
        num_bytes = planned_received(plan, at.rank)
        assert end.received_bytes == len(seconds) * num_bytes
        return {
            "transport": end.way,
            "givers": givers,
            "takers": takers,
            "gb_a_taker": num_bytes / 1e9,
            # The first one connects the ranks.
            "gb_per_s": round(num_bytes / min(seconds[1:]) / 1e9, 3) if seconds else 0.0,
        }
