"""What a million rows cost: the first start, the next ones, memory, and a recovery.

    python tests/benchmarks/large_data.py [--rows 1000000] [--no-recovery]

Each part has a process of its own. "wide" is a bound on prompts that their bytes alone keep, and
"tight" one for which every prompt is encoded. Ratios are to what no loader can go below: reading
the lines of the file as JSON, and for "tight" also the tokenizer's own batches of the same texts
with all its threads. The recovery is that of a tiny PPO run whose actor is killed; its services are
forked from a warm process. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from rolemesh.engine.data.prompts import load_prompts  # noqa: E402
from rolemesh.engine.data.rendering.rendering import Renderer  # noqa: E402
from rolemesh.engine.data.rendering.tokenizers import load_light_tokenizer  # noqa: E402
from rolemesh.engine.data.row_store import ROWS_AT_ONCE  # noqa: E402
from rolemesh.engine.specs import JsonlSpec  # noqa: E402

WIDE, TIGHT = 1024, 80
SAMPLED = 512
MODEL = ROOT / ".models/SmolLM2-135M-Instruct"
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "counts", "apples")


def write_rows(path: Path, count: int) -> None:
    """Writes short questions of about 100 bytes, each with a number as its answer."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            a, b = draw.randrange(10**6), draw.randrange(10**6)
            text = f"{' '.join(draw.choices(WORDS, k=8))}: what is {a} + {b}?"
            file.write(json.dumps({"prompt": text, "answer": a + b}) + "\n")


def reading(path: Path) -> dict[str, float]:
    """Reads the file line by line as JSON."""
    start = time.perf_counter()
    with path.open() as file:
        for line in file:
            json.loads(line)
    return {"s": time.perf_counter() - start}


def encoding(path: Path) -> dict[str, float]:
    """Encodes the rendered prompts in batches; rendering them is not counted."""
    tokenizer: Any = load_light_tokenizer(MODEL)
    rows = list(load_prompts(JsonlSpec(path=path), tokenizer=tokenizer, seed=0).every("train"))
    renderer, backend, seconds = Renderer(tokenizer), tokenizer.backend_tokenizer, 0.0
    for first in range(0, len(rows), ROWS_AT_ONCE):
        texts = renderer.prompt_texts(rows[first : first + ROWS_AT_ONCE])
        start = time.perf_counter()
        backend.encode_batch_fast(texts, add_special_tokens=False)
        seconds += time.perf_counter() - start
    return {"s": seconds}


def starting(path: Path, bound: int) -> dict[str, float]:
    """Loads the rows as an actor does, and renders a first step."""
    tokenizer = load_light_tokenizer(MODEL)
    spec = JsonlSpec(path=path, held_out_size=128, max_prompt_tokens=bound)
    process = psutil.Process()
    held, before, start = process.memory_info().rss, os.times(), time.perf_counter()
    prompts = load_prompts(spec, tokenizer=tokenizer, seed=0, max_model_len=SAMPLED)
    prompts.slice("train", 0, 16)
    seconds = time.perf_counter() - start
    # With that of its children.
    cpu = sum(os.times()[:4]) - sum(before[:4])
    gc.collect()
    return {"s": seconds, "cpu_s": cpu, "mib": (process.memory_info().rss - held) / 2**20}


def recovering(path: Path, folder: Path) -> float:
    """Seconds until a run goes on whose actor was killed while it sampled."""
    from recovery import recovery_seconds
    from support.kill_plans import Kill, Phase
    from support.killed_runs import killed_run
    from support.mesh_runs import tiny_recipe
    from support.tiny_models import write_tiny_llama

    model = write_tiny_llama(folder / "model")
    recipe = tiny_recipe(model, run__steps=4)
    recipe["actor"]["data"] = {"type": "jsonl", "path": str(path), "held_out_size": 4}
    kill = Kill("actor", Phase("sampling", "actor", "generate"), 0.0, from_step=2)
    killed_run(recipe, folder, [kill], 900)
    (seconds,) = recovery_seconds(folder)["role"]
    return seconds


def measured(part: str, path: Path, *arguments: str) -> Any:
    """What a part prints, in a process of its own."""
    command = [sys.executable, __file__, "--part", part, "--path", str(path), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{part} failed: {ended.stderr}")
    return json.loads(ended.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--no-recovery", action="store_true")
    parser.add_argument("--part", choices=("reading", "encoding", "starting"))
    parser.add_argument("--path", type=Path)
    parser.add_argument("--bound", type=int, default=0)
    given = parser.parse_args()
    if given.part is not None:
        found = {"reading": reading, "encoding": encoding}.get(given.part)
        print(json.dumps(found(given.path) if found else starting(given.path, given.bound)))
        return
    print(json.dumps(whole(given.rows, with_recovery=not given.no_recovery)))


def whole(rows: int, *, with_recovery: bool) -> dict[str, Any]:
    """All parts, with a cache folder of their own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        path = folder / "rows.jsonl"
        write_rows(path, rows)
        read = measured("reading", path)["s"]
        encode = measured("encoding", path)["s"]
        told: dict[str, Any] = {
            "rows": rows,
            "file_mib": round(path.stat().st_size / 2**20),
            "cpus": os.cpu_count(),
            "read_s": round(read, 2),
            "encode_s": round(encode, 2),
        }
        for kind, bound, least in (("wide", WIDE, read), ("tight", TIGHT, read + encode)):
            first, following = (
                measured("starting", path, "--bound", str(bound)) for _ in ("first", "next")
            )
            told[kind] = {
                "first_s": round(first["s"], 2),
                "first_cpu_s": round(first["cpu_s"], 2),
                "first_of_least": round(first["s"] / least, 2),
                "first_mib": round(first["mib"]),
                "next_s": round(following["s"], 2),
                "next_of_read": round(following["s"] / read, 2),
                "next_mib": round(following["mib"]),
            }
        if with_recovery:
            few = folder / "few.jsonl"
            write_rows(few, 100)
            told["recovery_s"] = {
                f"{count} rows": round(recovering(data, folder / f"run {count}"), 2)
                for count, data in ((100, few), (rows, path))
            }
        return told


if __name__ == "__main__":
    main()
