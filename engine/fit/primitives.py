"""Measures what the cost model multiplies with: products, memory, collectives, passes, decoding.

Each is a dict of kind, sizes and seconds as `coordinator/mapping/calibration/primitives.py` takes
them; seconds are the median of repetitions after one that does not count. On a CPU they are those
of the thread that computes, where it is alone: what other programs take of a shared machine does
not count then.
Models are random, written on the fly.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from rolemesh.engine.fit.rank_memory import RankWork, work_rows
from rolemesh.engine.layout.ranks import HybridLayout, TrainLayout
from rolemesh.engine.rollout.hf.sampler import HfBackend
from rolemesh.engine.rollout.requests import RolloutRequest
from rolemesh.engine.specs import HfSpec, ModelSpec, OptimizerSpec, SamplingSpec
from rolemesh.engine.specs.losses.sampled import PpoPolicyLossSpec
from rolemesh.engine.train.trainer import Trainer

_TRY_S = 0.6
"""Seconds for the repetitions of one size, of which there are 3 at least and 50 at most."""

_TOKENS = 2048
_WIDTHS = {"cpu": (64, 128, 256, 512), "cuda": (1024, 2048, 4096, 8192)}
"""Products are [tokens, width] x [width, 2 width]."""

_BYTES = {"cpu": (32 << 20, 64 << 20, 128 << 20), "cuda": (16 << 20, 256 << 20, 1 << 30)}

_MODELS = {"cpu": ((64, 2), (64, 6), (256, 4)), "cuda": ((1024, 8), (4096, 4))}
"""Widths and layers."""

_ROWS = {"cpu": ((4, 32, 16), (16, 48, 16)), "cuda": ((4, 256, 256), (16, 512, 512))}
"""Rows, tokens of their prompts, and of their completions."""

_VOCABULARY = {"cpu": 512, "cuda": 32_000}


def measured(device: torch.device) -> Iterator[dict[str, Any]]:
    """Measures a device, and what joins it to others of this machine, one thing after another.

    Args:
        device: A CPU, of which the threads of this process count, or a GPU.
    """
    kind = device.type
    yield from _products(device)
    for size in _BYTES[kind]:
        yield _copied("memory", size, device, device)
        # On a CPU both ends are host memory: what is copied for other processes to map.
        yield _copied("host", size, device, torch.device("cpu"))
    ranks = 2 if kind == "cpu" else min(8, torch.cuda.device_count())
    if ranks > 1:
        yield from _reduced(kind, ranks)
    for width, layers in _MODELS[kind]:
        yield from _model(device, width, layers)


def _median(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call, the first one left out."""
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if is_alone else time.perf_counter

    def timed() -> float:
        started = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - started

    timed()
    times = [timed() for _ in range(3)]
    while sum(times) < _TRY_S and len(times) < 50:
        times.append(timed())
    return statistics.median(times)


def _products(device: torch.device) -> Iterator[dict[str, Any]]:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for width in _WIDTHS[device.type]:
        left = torch.randn(_TOKENS, width, device=device, dtype=dtype)
        right = torch.randn(width, 2 * width, device=device, dtype=dtype)
        out = torch.empty(_TOKENS, 2 * width, device=device, dtype=dtype)
        seconds = _median(partial(torch.mm, left, right, out=out), device)
        sizes = {"rows": _TOKENS, "inner": width, "columns": 2 * width}
        yield {"kind": "matmul", "sizes": sizes, "seconds": seconds}


def _copied(kind: str, size: int, device: torch.device, to: torch.device) -> dict[str, Any]:
    is_locked = device.type == "cuda" and to.type == "cpu"
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.ones(size, dtype=torch.uint8, device=to, pin_memory=is_locked)
    seconds = _median(lambda: target.copy_(source, non_blocking=True), device)
    # A copy within a memory reads each byte and writes it; one to the host crosses once.
    moved = 2 * size if kind == "memory" else size
    return {"kind": kind, "sizes": {"bytes": moved}, "seconds": seconds}


def _reduced(kind: str, ranks: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        arguments: Any = (kind, ranks, folder)
        start_processes(_reduce_rank, arguments, nprocs=ranks, start_method="spawn")  # type: ignore[no-untyped-call]
        for line in (Path(folder) / "seconds").read_text().splitlines():
            size, seconds = line.split()
            sizes = {"bytes": int(size), "ranks": ranks}
            yield {"kind": "reduce", "sizes": sizes, "seconds": float(seconds)}


def _reduce_rank(rank: int, kind: str, ranks: int, folder: str) -> None:
    """One rank of an all-reduce; the first one writes what it took."""
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=ranks,
    )
    try:
        lines = []
        for size in (1 << 12, 1 << 18, 1 << 22, 1 << 26):
            tensor = torch.zeros(size // 4, device=device)
            times = []
            # As many on each rank: none may stop before the others.
            for _ in range(9):
                dist.barrier()
                started = time.perf_counter()
                dist.all_reduce(tensor)
                if kind == "cuda":
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - started)
            # A rank that waits for a core holds up all others: on a CPU the least is the truest.
            best = min(times) if kind == "cpu" else statistics.median(times[1:])
            lines.append(f"{size} {best}\n")
        if rank == 0:
            (Path(folder) / "seconds").write_text("".join(lines))
    finally:
        dist.destroy_process_group()


def _model(device: torch.device, width: int, layers: int) -> Iterator[dict[str, Any]]:
    """Passes, updates and, on a CPU, decoding of one random model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    vocabulary, head = _VOCABULARY[device.type], 32 if device.type == "cpu" else 128
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width if device.type == "cpu" else 4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(2, width // head),
        num_key_value_heads=max(1, width // head // 2),
        head_dim=head,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=1,
        dtype="float32",
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        LlamaForCausalLM(config).save_pretrained(folder)
        common = {"config": {**config.to_dict(), "model_type": "llama"}}
        for rows, prompt, completion in _ROWS[device.type]:
            sizes = {"rows": rows, "prompt_tokens": prompt, "completion_tokens": completion}
            for kind, seconds in _worked(device, folder, rows, prompt, completion):
                yield {"kind": kind, "sizes": sizes, "seconds": seconds, **common}


def _worked(
    device: torch.device, folder: Path, rows: int, prompt: int, completion: int
) -> Iterator[tuple[str, float]]:
    spec = ModelSpec(
        path=folder,
        micro_batch_tokens=rows * (prompt + completion),
        share_prefixes="never",
        compute_dtype="float32" if device.type == "cpu" else "bfloat16",
    )
    loss = PpoPolicyLossSpec()
    trainer = Trainer.policy(spec, OptimizerSpec(), device=device)
    batch, plan = work_rows(
        RankWork(
            kind="policy",
            model=spec,
            layout=HybridLayout(TrainLayout()),
            optimizer=OptimizerSpec(),
            loss=loss,
            row_tokens=prompt + completion,
            prompt_tokens=prompt,
            passes=1,
        )
    )
    yield "score", _median(lambda: trainer.compute_logprobs(batch, temperature=1.0), device)
    yield "update", _median(lambda: trainer.update(batch, loss, plan), device)
    if device.type != "cpu":
        # vLLM samples there; its start alone takes as long as all this. Runs tell (--run).
        return
    backend = HfBackend(
        HfSpec(max_model_len=prompt + completion, max_num_seqs=rows), folder, device=device
    )
    backend.update_weights(trainer.named_weights(), policy_version=1)
    requests = [
        RolloutRequest(row=row, prompt_tokens=[3 + row % 100] * prompt, seed=row)
        for row in range(rows)
    ]
    sampling = SamplingSpec(max_new_tokens=completion)
    yield "decode", _median(lambda: list(backend.generate(requests, sampling)), device)
    backend.close()
