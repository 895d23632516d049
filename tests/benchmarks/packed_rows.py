"""Measures updates of ragged rows and of turns against those of another checkout, in turns.

    python tests/benchmarks/packed_rows.py --before CHECKOUT [--model .models/SmolLM2-135M-Instruct]
        [--layers 15] [--mixtures uniform skewed short equal turns] [--repetitions 2] [--threads 2]
        [--micro-batch-tokens 4096] [--compute-dtype float32]

Each side is a process of its own with that checkout's code; it makes the same rows, and then one
after the other computes forward and backward of a PPO loss over them (without the optimizer's own
step, which does not depend on rows). Both keep the memory that they freed and let threads wait as
services do. `tokens` are those of the rows, `computed` those that a side put through the model,
padding included. Prints one JSON line; seconds are medians, `ratio` is before over now (`ratio_cpu`
of the processors' time, since other programs may have had them), `saved` is what the tokens
computed fell by.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

AS_A_SERVICE = {
    **{"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "4000"},
    **{"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**30)},
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Variables of `coordinator/run/services/commands.py` for services of one pool on a CPU."""

HERE = Path(__file__).resolve().parents[2]


def uniform() -> list[tuple[list[int], int]]:
    """8 rows of 64 to 512 tokens."""
    numbers = random.Random(1)
    return _rows([numbers.randint(64, 512) for _ in range(8)], seed=1)


def skewed() -> list[tuple[list[int], int]]:
    """8 rows, log-normal with a median of 200."""
    numbers = random.Random(2)
    lengths = [round(numbers.lognormvariate(5.3, 0.8)) for _ in range(8)]
    return _rows([min(max(length, 16), 2048) for length in lengths], seed=2)


def short() -> list[tuple[list[int], int]]:
    """64 rows of 16 to 64 tokens."""
    numbers = random.Random(3)
    return _rows([numbers.randint(16, 64) for _ in range(64)], seed=3)


def equal() -> list[tuple[list[int], int]]:
    """16 rows of 128 tokens: nothing was padded before either."""
    return _rows([128] * 16, seed=4)


def turns() -> list[tuple[list[int], int]]:
    """4 samples of a prompt, of 4 turns each; each turn is a row with all that came before."""
    numbers = random.Random(5)
    rows = []
    prompt = _tokens(120, numbers)
    for _ in range(4):
        history = list(prompt)
        for _ in range(4):
            answer = _tokens(50, numbers)
            rows.append(([*history, *answer], len(history)))
            history += [*answer, *_tokens(40, numbers)]
    return rows


MIXTURES: dict[str, Callable[[], list[tuple[list[int], int]]]] = {
    one.__name__: one for one in (uniform, skewed, short, equal, turns)
}


def _tokens(number: int, numbers: random.Random) -> list[int]:
    return [numbers.randint(100, 40_000) for _ in range(number)]


def _rows(lengths: list[int], seed: int) -> list[tuple[list[int], int]]:
    numbers = random.Random(seed)
    return [(_tokens(length, numbers), length // 4) for length in lengths]


# --- one side -----------------------------------------------------------------------------


def serve(arguments: argparse.Namespace) -> None:
    """Answers names of mixtures, a line each, with seconds and tokens."""
    import torch
    from support.updates import forward_backward

    from rolemesh.engine.experience import Column, ColumnKind, Experience
    from rolemesh.engine.specs import ModelSpec, OptimizerSpec, PpoPolicyLossSpec
    from rolemesh.engine.train.trainer import Trainer

    torch.set_num_threads(arguments.threads)
    spec = ModelSpec(
        path=arguments.model,
        compute_dtype=arguments.compute_dtype,
        num_layers=arguments.layers,
        micro_batch_tokens=arguments.micro_batch_tokens,
    )
    trainer: Any = Trainer.policy(spec, OptimizerSpec())

    def batch_of(rows: list[tuple[list[int], int]]) -> Experience:
        lengths = torch.tensor([len(tokens) - prompt for tokens, prompt in rows])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        generator = torch.Generator().manual_seed(0)
        number = int(offsets[-1])
        columns = {
            "advantages": torch.randn(number, generator=generator),
            "logprobs": torch.full((number,), -6.0),
            "loss_mask": torch.ones(number, dtype=torch.bool),
        }
        return Experience(
            {
                "tokens": Column.ragged(
                    ColumnKind.SEQUENCE, [torch.tensor(tokens) for tokens, _ in rows], torch.int64
                ),
                "prompt_lengths": Column(ColumnKind.ROW, torch.tensor([one for _, one in rows])),
                **{
                    name: Column(ColumnKind.COMPLETION, values, offsets)
                    for name, values in columns.items()
                },
            }
        )

    batches = {name: batch_of(make()) for name, make in MIXTURES.items()}
    print("ready", flush=True)
    for line in sys.stdin:
        batch = batches[line.strip()]
        began, computed_s = time.perf_counter(), time.process_time()
        metrics = forward_backward(trainer, batch, PpoPolicyLossSpec())
        seconds, cpu = time.perf_counter() - began, time.process_time() - computed_s
        squares = sum(
            float(weight.grad.square().sum()) for _, weight in trainer.model.named_weights()
        )
        trainer.drop_gradients()
        computed = sum(
            one.num_tokens if hasattr(one, "num_tokens") else one.padded.tokens_BT.numel()
            for one in trainer.rank_model.micro_batches(batch)
        )
        told = {
            "seconds": seconds,
            "cpu": cpu,
            "computed": computed,
            "tokens": len(batch["tokens"].values),
        }
        told |= {"loss": metrics["loss"], "gradient_norm": squares**0.5}
        print(json.dumps(told), flush=True)


def start(checkout: Path, arguments: list[str]) -> subprocess.Popen[str]:
    """A side, when it is ready."""
    paths = os.pathsep.join([str(checkout / "src"), str(checkout / "tests")])
    side = subprocess.Popen(
        [sys.executable, __file__, "--serve", *arguments],
        env={**AS_A_SERVICE, **os.environ, "PYTHONPATH": paths},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert side.stdout is not None
    if side.stdout.readline().strip() != "ready":
        raise SystemExit(f"{checkout}: did not start; see above")
    return side


def asked(side: subprocess.Popen[str], name: str) -> dict[str, float]:
    """What a side found."""
    to_side, from_side = side.stdin, side.stdout
    assert to_side is not None
    assert from_side is not None
    to_side.write(name + "\n")
    to_side.flush()
    found: dict[str, float] = json.loads(from_side.readline())
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="another checkout of this repository")
    parser.add_argument("--model", type=Path, default=HERE / ".models/SmolLM2-135M-Instruct")
    parser.add_argument("--layers", type=int, default=15, help="keep only the first layers")
    parser.add_argument("--mixtures", nargs="*", choices=MIXTURES, default=list(MIXTURES))
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--compute-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return 0
    if arguments.before is None:
        # Without another checkout: this one against itself, which shows the noise.
        arguments.before = HERE
    sides = {
        name: start(checkout, sys.argv[1:])
        for name, checkout in (("before", arguments.before.resolve()), ("now", HERE))
    }
    points = {}
    for name in arguments.mixtures:
        found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for _ in range(arguments.repetitions + 1):
            for side, process in sides.items():
                found[side].append(asked(process, name))
        # The first ones allocate.
        medians, cpu = (
            {side: statistics.median(one[key] for one in told[1:]) for side, told in found.items()}
            for key in ("seconds", "cpu")
        )
        before, now = found["before"][-1], found["now"][-1]
        points[name] = {
            "tokens": now["tokens"],
            "computed": {"before": before["computed"], "now": now["computed"]},
            "seconds": {side: round(seconds, 3) for side, seconds in medians.items()},
            "saved": round(before["computed"] / now["computed"], 2),
            "ratio": round(medians["before"] / medians["now"], 2),
            "ratio_cpu": round(cpu["before"] / cpu["now"], 2),
            "gradient_norms_differ_by": abs(before["gradient_norm"] / now["gradient_norm"] - 1),
        }
        print(json.dumps({name: points[name]}), file=sys.stderr, flush=True)
    for process in sides.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    print(
        json.dumps(
            {
                "benchmark": "packed_rows",
                "config": {
                    "model": arguments.model.name,
                    "layers": arguments.layers,
                    "micro_batch_tokens": arguments.micro_batch_tokens,
                    "repetitions": arguments.repetitions,
                    "threads": arguments.threads,
                    "compute_dtype": arguments.compute_dtype,
                },
                "points": points,
                "versions": {"python": platform.python_version()},
                "machine": {"processor": platform.machine(), "cores": os.cpu_count()},
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
