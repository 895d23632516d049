"""Resharding of an actor, against a plain copy of the same bytes and against full gather and slice.

    python tests/benchmarks/reshard.py [--transport memory] [--repetitions 7] [--train 1-4-1]
        [--generate 1-2] [--scale 1] [--hosts 2 [--link 10:1]]

Four processes, one decoder of some 40 MB in float32 (--scale 3: 220), from the training layout to
vLLM's fused generation layout:
    reshard  WeightTransfer: local reuse, and each missing element once
    full     what verl's FSDP path does: every rank gathers every parameter whole, one bucket after
             the other, and slices its generation tensors out of it
    vanilla  the paper's HybridFlow-V: the ranks of each training replica gather the whole model
    copy     the bytes that reshard receives are copied inside each process, without any transport
    build    the generation tensors are copied from memory: what any way has to write at least
Ways alternate, so that a slow moment of the machine meets all; a barrier stands before and after
each, and the slowest rank counts. Each writes memory that is fresh, as weights of a sampler that
slept are. Processor time is that of all ranks, which other work on the
machine changes less. Every way's tensors are compared with the weights first. Bytes
are counted at the transport. With --hosts the ranks lie in equal blocks on that many hosts, which
are network namespaces (needs root), joined by a switch or, two of them, by a cable of so many Gb/s
and ms of round trip. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.cables import Cable
from support.hosts import HostNetwork, run_ip
from support.planned_bytes import planned_received
from support.rank_processes import RankContext, RankPool
from support.transport_ranks import process_transport
from support.weight_ranks import assert_equal, cut, random_weights

from rolemesh.engine.layout.boxes import generate_layout, train_layout, whole_layout
from rolemesh.engine.layout.families import DecoderShape
from rolemesh.engine.layout.ranks import GenerateLayout, HybridLayout, TrainLayout
from rolemesh.engine.transport.base import Transport
from rolemesh.engine.transport.groups.gloo import GlooTransport
from rolemesh.engine.weights.plan import make_plan
from rolemesh.engine.weights.transfer import WeightTransfer

TIMEOUT_S = 120.0
WARM_UP = 1
CLONE_NEWNET = 0x40000000
M_MMAP_THRESHOLD = -3
WAYS = ("reshard", "full", "vanilla", "copy", "build")


def decoder(scale: int) -> DecoderShape:
    """A decoder of 38.5 MB in float32, with every width `scale` times as large."""
    return DecoderShape.from_config(
        {
            "model_type": "llama",
            "hidden_size": 384 * scale,
            "intermediate_size": 1024 * scale,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 48 * scale,
            "vocab_size": 4096,
            "tie_word_embeddings": False,
        }
    )


def measure(
    context: RankContext,
    kind: str,
    train: TrainLayout,
    generate: GenerateLayout,
    repetitions: int,
    bucket_bytes: int,
    scale: int,
    names: list[str],
) -> dict[str, Any]:
    """Seconds of each way by repetition, and bytes that this rank received."""
    torch.set_num_threads(1)
    keep_no_memory()
    layout = HybridLayout(train, generate)
    shape = decoder(scale)
    source = train_layout(shape, train)
    target = generate_layout(shape, layout, "float32")
    whole = whole_layout(shape.manifest("float32"), context.world_size)
    weights = random_weights(source.manifest)
    held = cut(source, context.rank, weights)
    expected = cut(target, context.rank, weights)
    direct = make_plan(source, target, bucket_bytes=bucket_bytes)
    # verl's FSDP actor: every parameter cut over all ranks, gathered from all of them.
    sharded = train_layout(shape, TrainLayout(dp=context.world_size, fsdp=context.world_size))
    gather = make_plan(sharded, whole, bucket_bytes=bucket_bytes)
    vanilla = make_plan(source, whole, bucket_bytes=bucket_bytes)
    sharded_held = cut(sharded, context.rank, weights)
    wanted = planned_received(direct, context.rank)
    received = torch.ones(max(1, wanted), dtype=torch.uint8)

    with ExitStack() as stack:
        # Torch's world is there for barriers, also where the transport does without it.
        mesh = stack.enter_context(
            context.connect(HybridLayout(TrainLayout(dp=context.world_size)), name="barrier")
        )
        transport: Transport = stack.enter_context(
            GlooTransport(mesh) if kind == "gloo" else process_transport(context, kind)
        )

        def run(plan: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            transfer = transfers.setdefault(
                id(plan),
                WeightTransfer(plan, context.rank, transport, timeout_s=TIMEOUT_S),
            )
            return dict(transfer.run(tensors))

        transfers: dict[int, WeightTransfer] = {}

        ways: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
            "reshard": lambda: run(direct, held),
            "full": lambda: cut(target, context.rank, run(gather, sharded_held)),
            "vanilla": lambda: cut(target, context.rank, run(vanilla, held)),
            "copy": lambda: {"": received.clone()},
            "build": lambda: {name: tensor.clone() for name, tensor in expected.items()},
        }
        ways = {name: ways[name] for name in names}
        moved = {}
        for name, way in ways.items():
            before = transport.received_bytes
            tensors = way()
            moved[name] = transport.received_bytes - before
            if name != "copy":
                assert_equal(tensors, expected)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        cpu_seconds: dict[str, list[float]] = {name: [] for name in ways}
        for repetition in range(WARM_UP + repetitions):
            for name, way in ways.items():
                dist.barrier()
                started, computed = time.perf_counter(), time.process_time()
                way()
                computed = time.process_time() - computed
                dist.barrier()
                if repetition >= WARM_UP:
                    cpu_seconds[name].append(computed)
                    seconds[name].append(time.perf_counter() - started)
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "received": moved,
            "planned": wanted,
        }


def keep_no_memory() -> None:
    """Has malloc map each tensor anew: else one way pays for the memory that the next one gets."""
    if not ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16):
        raise RuntimeError("mallopt refuses the threshold")


def enter(context: RankContext, spaces: list[str], interface: str) -> None:
    """Puts this thread of a rank on its host: what it opens from now on lies there."""
    # The store of the benchmark's process stays open.
    context.store()
    with open(f"/run/netns/{spaces[context.rank * len(spaces) // context.world_size]}") as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns failed")
    os.environ["GLOO_SOCKET_IFNAME"] = interface


def measure_on_hosts(
    context: RankContext, spaces: list[str], interface: str, *arguments: Any
) -> dict[str, Any]:
    """`measure`, by ranks that lie on hosts."""
    enter(context, spaces, interface)
    return measure(context, *arguments)


@contextmanager
def hosts(number: int, link: str) -> Iterator[tuple[list[str], str]]:
    """Names of the hosts' namespaces, and of the interface by which they reach each other."""
    with ExitStack() as stack:
        network = stack.enter_context(HostNetwork(number))
        interface = "eth0"
        if link:
            gigabits, round_trip_ms = map(float, link.split(":"))
            cable = Cable(network, bits_per_s=gigabits * 1e9, round_trip_s=round_trip_ms / 1e3)
            interface = stack.enter_context(cable).interface
        spaces = [network.space(host) for host in range(number)]
        for space in spaces:
            # Ranks of a host reach each other by it.
            run_ip("-n", space, "link", "set", "lo", "up")
        yield spaces, interface


def sizes(text: str, count: int) -> list[int]:
    numbers = [int(part) for part in text.split("-")]
    if len(numbers) != count:
        raise SystemExit(f"{text!r}: give {count} numbers, as 1-4-1")
    return numbers


def ratios(values: dict[str, float]) -> dict[str, float]:
    """How many times as much as resharding each other way takes."""
    ours = values.get("reshard", math.nan)
    return {name: value / ours for name, value in values.items() if name != "reshard"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--transport", choices=["memory", "shm", "gloo"], default="memory")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--train", default="1-4-1", help="p-t-d")
    parser.add_argument("--generate", default="1-2", help="p_g-t_g")
    parser.add_argument("--bucket-kib", type=int, default=2048)
    parser.add_argument("--scale", type=int, default=1, help="of all widths of the model")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--link", default="", help="Gb/s:ms between two hosts")
    options = parser.parse_args()
    if (options.hosts > 1) > (options.transport == "gloo") or (options.link and options.hosts != 2):
        parser.error("--hosts needs --transport gloo, and --link needs --hosts 2")
    pp, tp, dp = sizes(options.train, 3)
    pp_g, tp_g = sizes(options.generate, 2)
    train, generate = TrainLayout(pp=pp, tp=tp, dp=dp), GenerateLayout(pp=pp_g, tp=tp_g)
    layout = HybridLayout(train, generate)
    shape = decoder(options.scale)
    with RankPool(layout.world_size) as pool, ExitStack() as stack:
        place: tuple[Any, ...] = (measure, layout.world_size)
        if options.hosts > 1:
            place = (measure_on_hosts, layout.world_size,
                     *stack.enter_context(hosts(options.hosts, options.link)))  # fmt: skip
        ranks = pool.run(
            *place,
            options.transport,
            train,
            generate,
            options.repetitions,
            options.bucket_kib << 10,
            options.scale,
            options.ways,
            timeout_s=600,
        )
    names = list(ranks[0]["seconds"])
    slowest = {
        name: [max(times) for times in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
        for name in names
    }
    median = {name: statistics.median(times) for name, times in slowest.items()}
    cpu = {
        name: statistics.median(
            sum(times) for times in zip(*(rank["cpu_seconds"][name] for rank in ranks), strict=True)
        )
        for name in names
    }
    received: dict[str, float] = {
        name: max(rank["received"][name] for rank in ranks)
        for name in ("reshard", "full", "vanilla")
        if name in names
    }
    whole = sum(parameter.num_bytes for parameter in shape.manifest("float32").values())
    print(
        json.dumps(
            {
                "benchmark": "reshard",
                "config": {
                    "transport": options.transport,
                    "hosts": options.hosts,
                    "link": options.link,
                    "train": options.train,
                    "generate": options.generate,
                    "d_g": layout.micro_dp,
                    "model_bytes": whole,
                    "bucket_bytes": options.bucket_kib << 10,
                    "repetitions": options.repetitions,
                },
                "received_bytes": received,
                "share_of_model": {name: each / whole for name, each in received.items()},
                "median_s": median,
                "median_cpu_s": cpu,
                "spread_s": {name: [min(times), max(times)] for name, times in slowest.items()},
                "bytes_to_reshard": ratios(received),
                "time_to_reshard": ratios(median),
                "cpu_to_reshard": ratios(cpu),
                "python": platform.python_version(),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
