"""Ranks that exchange bytes or train together: parts of the first hour.

The functions of ranks stand here and not in the script that runs the parts: they travel to other
processes by the name of their module, which `__main__` is not.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from first_hour_tools import Found, needs, scratch

MiB = 1 << 20


def nccl(found: Found) -> None:
    """Torch's NCCL between all GPUs; on one GPU between two ranks that share it."""
    from support.rank_processes import run_ranks

    count = torch.cuda.device_count()
    world = count if count > 1 else 2
    found["ranks"], found["gpus"] = world, count
    for result in run_ranks(_all_reduce, world, timeout_s=200.0):
        found["all_reduce"] = result
    try:
        names = run_ranks(exchanged_weights, world, timeout_s=200.0)
    except AssertionError as error:
        found["weights_between_ranks"] = f"failed: {error}"
        raise
    found["weights_between_ranks"] = names[0]
    try:
        found["weights_between_services"] = run_ranks(given_weights, world, timeout_s=200.0)[-1]
    except AssertionError as error:
        found["weights_between_services"] = f"failed: {error}"
        raise


def _rank_device(at: Any) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")  # As where the script itself is tested.
    count = torch.cuda.device_count()
    device = torch.device("cuda", at.rank % count)
    torch.cuda.set_device(device)
    if at.world_size > count:
        # NCCL refuses two ranks of one host on one device.
        os.environ["NCCL_HOSTID"] = f"rolemesh-rank-{at.rank}"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    return device


def _all_reduce(at: Any) -> dict[str, float]:
    import torch.distributed as dist

    from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout

    device = _rank_device(at)
    layout = HybridLayout(TrainLayout(dp=at.world_size))
    with at.connect(layout, backend="cpu:gloo,cuda:nccl", timeout_s=120.0):
        values = torch.ones(256 * MiB // 4, device=device)
        dist.all_reduce(values)
        torch.cuda.synchronize(device)
        assert float(values[-1]) == at.world_size
        started = time.perf_counter()
        for _ in range(5):
            dist.all_reduce(values)
        torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - started) / 5
    # Each rank sends and receives 2 (n - 1) / n of the bytes.
    moved = values.nbytes * 2 * (at.world_size - 1) / at.world_size
    return {"seconds_256_mib": seconds, "bus_gb_per_s": moved / seconds / 1e9}


def exchanged_weights(at: Any) -> str:
    """A MiB from each rank to each other one, as weights travel; the name of their transport."""
    from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
    from rolemesh.engine.transport.base import Message
    from rolemesh.engine.transport.selection import make_transport

    device = _rank_device(at)
    layout = HybridLayout(TrainLayout(dp=at.world_size))
    with at.connect(layout, timeout_s=120.0) as mesh, make_transport(mesh, device) as transport:
        peers = [rank for rank in range(at.world_size) if rank != at.rank]
        ours = torch.full((MiB,), at.rank, dtype=torch.uint8, device=device)
        theirs = {peer: torch.full_like(ours, 255) for peer in peers}
        transport.exchange(
            [Message(peer, ours) for peer in peers],
            [Message(peer, theirs[peer]) for peer in peers],
        ).wait(60.0)
        for peer in peers:
            assert bool((theirs[peer] == peer).all()), f"rank {peer} sent other bytes"
        return transport.name


def given_weights(at: Any, layers: int = 16) -> dict[str, Any]:
    """The first half of the ranks sends weights to the others, as an actor to a rollout service.

    GB/s are those that this rank takes, 0 for one that gives. The decoder has 64 MiB a layer, in
    bfloat16; half of the givers' time is the cast from float32.
    """
    from support.planned_bytes import planned_received

    from rolemesh.engine.layout.families import DecoderShape
    from rolemesh.engine.layout.ranks import TrainLayout
    from rolemesh.engine.weights.exchange import ExchangeEnd, exchange_plan

    device = _rank_device(at)
    if at.world_size > torch.cuda.device_count():
        # NCCL takes them for two hosts then, and the ranks do not object to one device.
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
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
            "gb_per_s": num_bytes / min(seconds[1:]) / 1e9 if seconds else 0.0,
        }


def fsdp(found: Found) -> None:
    """FSDP2 on two ranks: on two GPUs, or on one that they share, by distinct host ids."""
    needs("transformers", "pydantic")
    from support.rank_processes import run_ranks
    from support.tiny_models import write_tiny_llama

    found["gpus"] = torch.cuda.device_count()
    with scratch() as folder:
        model = write_tiny_llama(folder / "model", hidden_size=1024, num_layers=4)
        alone = run_ranks(_trained_rank, 1, model, timeout_s=120.0)
        both = run_ranks(_trained_rank, 2, model, timeout_s=200.0)
    found["alone"], found["both"] = alone, both
    losses = [result["metrics"]["loss"] for result in (*alone, *both)]
    assert max(losses) - min(losses) < 1e-3 * abs(losses[0]), f"losses differ: {losses}"
    for result in both:
        assert result["held_bytes"] < 0.65 * alone[0]["held_bytes"], "the parameters are not cut"
        assert result["parameters_on"] == [result["device"]]
        assert result["asleep_bytes"] < 0.2 * result["held_bytes"]


def _trained_rank(at: Any, folder: Path) -> dict[str, Any]:
    from support.token_batches import token_batch
    from support.updates import update_whole

    from rolemesh.engine.devices import give_back_memory
    from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
    from rolemesh.engine.specs import ModelSpec, OptimizerSpec, SftLossSpec
    from rolemesh.engine.train.trainer import Trainer

    device = _rank_device(at)
    layout = HybridLayout(TrainLayout(dp=at.world_size, fsdp=at.world_size))
    with at.connect(layout, backend="cpu:gloo,cuda:nccl", timeout_s=120.0) as mesh:
        before = torch.cuda.memory_allocated(device)
        trainer = Trainer.policy(ModelSpec(path=folder), OptimizerSpec(), device=device, mesh=mesh)
        metrics = update_whole(
            trainer, token_batch(), SftLossSpec(), epochs=1, mini_batch_rows=8, seed=0
        )
        give_back_memory(device)
        held = torch.cuda.memory_allocated(device) - before
        places = sorted({str(weight.device) for _, weight in trainer.named_weights()})
        trainer.move_to(torch.device("cpu"))
        give_back_memory(device)
        return {
            "device": str(device),
            "parameters_on": places,
            "held_bytes": held,
            "asleep_bytes": torch.cuda.memory_allocated(device) - before,
            "metrics": {
                name: value for name, value in metrics.items() if name in ("loss", "grad_norm")
            },
        }
