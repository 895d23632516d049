"""An optimizer update in a process with vLLM loaded against one in a process without.

    python tests/benchmarks/rollout_threads.py [--rounds 21] [--threads 2]

Two child processes hold the same model and take turns: one update here, one there, the other
asleep meanwhile, so that a slow moment of the machine meets both. The one with vLLM has sampled
and been sent weights, and samples again before every update. Prints one JSON line; `ratio` is
the median over rounds of (with vLLM / without) in wall time, `cpu_ratio` the same in CPU time,
which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BATCH_ROWS, ROW_TOKENS = 8, 96


def child(folder: Path, threads: int, *, with_vllm: bool) -> None:
    """Does one update for each line on stdin; answers with wall and CPU seconds."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    tokens = torch.randint(
        4, 512, (BATCH_ROWS, ROW_TOKENS), generator=torch.Generator().manual_seed(0)
    )

    def update() -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - wall, time.process_time() - cpu

    generate = load_vllm(folder, model) if with_vllm else None
    update()
    print(json.dumps({"threads": torch.get_num_threads(), "openmp": openmp_runtimes()}), flush=True)
    for _ in sys.stdin:
        answer: dict[str, Any] = {}
        if generate is not None:
            answer["generate_cores"] = generate()
        answer["wall_s"], answer["cpu_s"] = update()
        print(json.dumps(answer), flush=True)


def load_vllm(folder: Path, model: Any) -> Any:
    """Loads vLLM; returns a function that samples and tells how many cores it kept busy."""
    from rolemesh.engine.rollout.factory import make_backend
    from rolemesh.engine.rollout.requests import RolloutRequest
    from rolemesh.engine.specs import SamplingSpec, VllmSpec

    backend = make_backend(VllmSpec(max_model_len=128), folder)
    requests = [RolloutRequest(row=i, prompt_tokens=[5, 6, 7, i + 9], seed=i) for i in range(32)]
    versions = iter(range(1_000_000))

    def generate() -> float:
        backend.update_weights(model.named_parameters(), next(versions))
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in backend.generate(requests, SamplingSpec(max_new_tokens=24)):
            pass
        return (time.process_time() - cpu) / (time.perf_counter() - wall)

    generate()
    return generate


def openmp_runtimes() -> list[str]:
    """OpenMP libraries mapped into this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split()[-1] for line in lines if "omp" in line.rpartition("/")[2]}
    return sorted("/".join(Path(path).parts[-2:]) for path in paths)


def start(folder: Path, threads: int, kind: str) -> subprocess.Popen[str]:
    """Starts a child."""
    command = [sys.executable, __file__, "--child", kind, str(folder), "--threads", str(threads)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_json(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The child's next answer."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise RuntimeError(f"a child ended with status {process.wait()}")


def ask(process: subprocess.Popen[str]) -> dict[str, Any]:
    """One turn of a child."""
    assert process.stdin is not None
    process.stdin.write("update\n")
    process.stdin.flush()
    return read_json(process)


def measure(rounds: int, threads: int) -> dict[str, Any]:
    """Runs both children in turns."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.tiny_models import write_tiny_llama

    with tempfile.TemporaryDirectory() as directory:
        folder = write_tiny_llama(
            Path(directory) / "model", hidden_size=512, num_layers=8, num_heads=16, num_kv_heads=16
        )
        children = {kind: start(folder, threads, kind) for kind in ("without", "with")}
        try:
            facts = {kind: read_json(process) for kind, process in children.items()}
            turns: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
            for number in range(rounds):
                order = ("without", "with") if number % 2 else ("with", "without")
                for kind in order:
                    turns[kind].append(ask(children[kind]))
        finally:
            for process in children.values():
                process.terminate()
                process.wait()

    def ratios(key: str) -> list[float]:
        pairs = zip(turns["with"], turns["without"], strict=True)
        return sorted(loaded[key] / bare[key] for loaded, bare in pairs)

    wall = ratios("wall_s")
    return {
        "benchmark": "rollout_threads",
        "ratio": round(statistics.median(wall), 4),
        "ratio_quartiles": [round(wall[len(wall) // 4], 4), round(wall[3 * len(wall) // 4], 4)],
        "cpu_ratio": round(statistics.median(ratios("cpu_s")), 4),
        "update_s": {
            kind: round(statistics.median(turn["wall_s"] for turn in turns[kind]), 4)
            for kind in turns
        },
        "generate_cores": round(
            statistics.median(turn["generate_cores"] for turn in turns["with"]), 2
        ),
        "children": facts,
        "config": {
            "rounds": rounds,
            "threads": threads,
            "batch_tokens": BATCH_ROWS * ROW_TOKENS,
            "model": "Llama, 8 layers, hidden size 512, float32",
        },
        "machine": {"cores": os.cpu_count(), "processor": platform.machine()},
        "python": platform.python_version(),
    }


def main() -> None:
    """Reads the command line and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--child", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, folder = arguments.child
        child(Path(folder), arguments.threads, with_vllm=kind == "with")
    else:
        print(json.dumps(measure(arguments.rounds, arguments.threads)))


if __name__ == "__main__":
    main()
