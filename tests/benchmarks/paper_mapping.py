"""The cost model against the paper's evaluation (arXiv 2409.19256, section 8); one JSON line.

    PYTHONPATH=tests python tests/benchmarks/paper_mapping.py [--parts placements ...] [--tables]

    placements   which placement wins at each number of GPUs (Fig. 12, 13)
    generation   seconds over the tensor slices of generation, t_g (Fig. 15)
    transition   bytes and seconds from training to generation (Fig. 14)
    speedups     over DeepSpeed-Chat, OpenRLHF and NeMo-Aligner as the paper describes them (Fig. 9
                 to 11)

Nothing is fitted: all coefficients are the defaults, so that every cell is kept out. Values of the
paper are its text's; those marked "figure" were read off bars by others. --tables prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from support.mapping_jobs import LLAMAS, PAPER_FREEDOM, job, paper_group

from rolemesh.coordinator.mapping.job.job import Job, Role, Wishes
from rolemesh.coordinator.mapping.job.layouts import Freedom, Layout
from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.coordinator.mapping.job.systems import HYBRIDFLOW
from rolemesh.coordinator.mapping.job.tasks import Step, Task, TaskKind
from rolemesh.coordinator.mapping.search.search import Placement, Search
from rolemesh.coordinator.mapping.simulators.generation import NoRoomError, Sampling
from rolemesh.coordinator.mapping.simulators.memory import scored_bytes, trained_bytes
from rolemesh.coordinator.mapping.simulators.moves import (
    publish_seconds,
    received_bytes,
    reshard_seconds,
)
from rolemesh.coordinator.mapping.simulators.passes import scoring_seconds, update_seconds

Row = dict[str, Any]

# Fig. 12 and 13, and the text of section 8.

PLACEMENTS: Mapping[str, list[tuple[str, ...]]] = {
    "colocate": [("actor", "critic", "reference", "reward")],
    "split": [("actor", "reference"), ("critic", "reward")],
    "standalone": [("actor",), ("critic",), ("reference",), ("reward",)],
    "critic apart": [("actor", "reference", "reward"), ("critic",)],
}
MIXED = {"actor": "13B", "reference": "13B", "critic": "70B", "reward": "70B"}
WINNERS: list[tuple[str, Any, Mapping[int, str]]] = [
    (
        "13B",
        "13B",
        {16: "colocate", 24: "colocate", 32: "colocate", 64: "colocate", 96: "split",
         128: "standalone"},
    ),
    (
        "34B",
        "34B",
        {32: "colocate", 48: "colocate", 64: "colocate", 96: "split", 128: "split"},
    ),
    (
        "13B/70B",
        MIXED,
        {32: "colocate", 64: "colocate", 96: "split", 128: "critic apart"},
    ),
]  # fmt: skip


def placements() -> Iterator[Row]:
    for name, sizes, winners in WINNERS:
        for gpus, winner in winners.items():
            search = Search(job("ppo", sizes), [paper_group(gpus)])
            found = search.run(kept=15)
            periods = {one.sets: one.period for one in found.placements}
            ours = {
                label: periods.get(tuple(sets), float("inf")) for label, sets in PLACEMENTS.items()
            }
            best = min(ours, key=lambda label: ours[label])
            named = [label for label in ours if label != "critic apart"]
            of_three = min(named, key=lambda label: ours[label])
            chosen = found.placements[0]
            yield {
                "models": name,
                "gpus": gpus,
                "paper": winner,
                "ours": best,
                "agrees": best == winner,
                "ours_of_the_three_named": of_three,
                "paper_winner_costs": round(ours[winner] / ours[best] - 1, 3),
                "seconds": {label: _rounded(one) for label, one in ours.items()},
                "optimum": described(chosen),
                "optimum_s": _rounded(chosen.period),
            }


def described(placement: Placement) -> str:
    pools = zip(placement.sets, placement.sizes, strict=True)
    return ", ".join(f"{'+'.join(roles)} {size}" for roles, size in pools)


# Fig. 15: 16 GPUs, training 1-8-2, all roles on all GPUs.

BEST_SLICES = {"7B": (2, 0.603), "13B": (4, 0.364)}
"""Best t_g, and how much shorter than with t_g = 8."""
FIGURE_15 = {"7B": {2: 35, 8: 88}, "13B": {1: 225, 4: 145, 8: 228}}
"""Seconds, read off the figure: low confidence."""


def generation() -> Iterator[Row]:
    group, work = paper_group(16), job("ppo", "7B").work
    for name, (best, gain) in BEST_SLICES.items():
        model = Model.from_config(LLAMAS[name])
        train = Layout(tp=8, dp=2, recompute="full", micro_batch_tokens=2048)
        held = 2 * trained_bytes(model, train, HYBRIDFLOW).rest
        held += 2 * scored_bytes(model, train, HYBRIDFLOW).rest + 4 * HYBRIDFLOW.process_bytes
        budget = group.device.memory_bytes * (1 - HYBRIDFLOW.spare) - held
        seconds: dict[int, float | None] = {}
        rows: dict[int, int | None] = {}
        for slices in (1, 2, 4, 8):
            layout = replace(train, generate_tp=slices)
            try:
                found = Sampling(model, layout, work, group, HYBRIDFLOW, 1024).seconds(budget)
            except NoRoomError:
                seconds[slices], rows[slices] = None, None
                continue
            moved = reshard_seconds(model, layout, group, HYBRIDFLOW)
            seconds[slices] = round(found.total + moved, 1)
            rows[slices] = found.together
        fitting = {slices: s for slices, s in seconds.items() if s is not None}
        ours = min(fitting, key=lambda slices: fitting[slices])
        ours_gain = 1 - fitting[ours] / fitting[8]
        yield {
            "model": name,
            "paper_best": best,
            "ours_best": ours,
            "agrees": ours == best,
            "paper_gain": gain,
            "ours_gain": round(ours_gain, 3),
            "seconds": seconds,
            "rows_together": rows,
            "figure_s": FIGURE_15[name],
        }


# Fig. 14.

TRANSITIONS: Mapping[str, tuple[Layout, float, float]] = {
    "7B": (Layout(tp=8, generate_tp=2), 5.25, 12.25),
    "13B": (Layout(tp=8, generate_tp=4), 3.25, 22.75),
    "34B": (Layout(pp=4, tp=8, generate_tp=8), 6.375, 65.875),
    "70B": (Layout(pp=8, tp=8, generate_tp=8), 15.3125, 137.8125),
}
"""Layout of each model, and GB that a GPU receives: HybridFlow, HybridFlow-V (nominal sizes)."""
TRANSITION_S = {"70B": {"hybridflow": 9.6, "openrlhf": 87.8, "deepspeed_chat": 33.0}}
"""Seconds that follow from the percentages of the text."""
LEAST_CUT = {"average": 0.552, "over OpenRLHF at 70B": 0.891, "over DeepSpeed-Chat": 0.712}


def transition() -> Iterator[Row]:
    gpus = 128
    group = paper_group(gpus)
    for name, (layout, volume, vanilla) in TRANSITIONS.items():
        model = Model.from_config(LLAMAS[name])
        layout = replace(layout, dp=gpus // (layout.tp * layout.pp))
        zero = Layout(dp=gpus, fsdp=gpus)
        systems = {
            kind: reshard_seconds(model, layout, group, replace(HYBRIDFLOW, reshard=kind))
            for kind in ("plan", "vanilla", "zero")
        }
        copied = publish_seconds(model, zero, group, replace(HYBRIDFLOW, reshard="copy"))
        ours = {
            "hybridflow": systems["plan"],
            "hybridflow_v": systems["vanilla"],
            "deepspeed_chat": systems["zero"],
            "openrlhf": copied,
        }
        received = received_bytes(model, layout) / 1e9
        whole = 2 * model.num_parameters / 1e9
        ranks = layout.tp * layout.pp
        nominal = volume / (vanilla * ranks / (ranks - 1))
        yield {
            "model": name,
            "received_share": round(received / whole, 4),
            "paper_share": round(nominal, 4),
            "vanilla_share": round((ranks - 1) / ranks, 4),
            "received_gb": round(received, 2),
            "seconds": {label: round(one, 2) for label, one in ours.items()},
            "paper_s": TRANSITION_S.get(name),
            "shorter_than_openrlhf": round(1 - ours["hybridflow"] / ours["openrlhf"], 3),
            "shorter_than_deepspeed_chat": round(
                1 - ours["hybridflow"] / ours["deepspeed_chat"], 3
            ),
        }


# Fig. 9 to 11.

GPUS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "ppo": {
        "7B": (8, 16, 32, 64, 128), "13B": (16, 32, 64, 128), "34B": (32, 64, 128),
        "70B": (64, 128),
    },
    "remax": {
        "7B": (8, 16, 32, 64, 128), "13B": (8, 16, 32, 64, 128), "34B": (16, 32, 64, 128),
        "70B": (32, 64, 128),
    },
    "safe_rlhf": {
        "7B": (8, 16, 32, 64, 128), "13B": (16, 32, 64, 128), "34B": (32, 64, 128),
        "70B": (64, 128),
    },
}  # fmt: skip
BANDS = {
    "ppo": {"7B": (1.68, 8.63), "13B": (2.70, 18.96), "34B": (2.41, 20.57), "70B": (5.17, 17.98)},
    "remax": {"7B": (1.53, 2.56), "13B": (2.49, 3.66), "34B": (2.14, 4.80), "70B": (6.46, 9.78)},
    "safe_rlhf": {
        "7B": (1.71, 12.87), "13B": (2.49, 18.47), "34B": (2.20, 19.76), "70B": (4.89, 16.86),
    },
}  # fmt: skip
"""Least and most speed-up over any baseline."""
AVERAGES = {
    "deepspeed_chat": (3.67, 7.84), "openrlhf": (3.25, 5.93), "nemo_aligner": (12.52, 20.57),
}  # fmt: skip
"""PPO: mean and most speed-up."""

ZERO = Freedom(
    most_slices=1, cuts_over_data=(True,), micro_batch_tokens=(2048, 4096, 8192),
    recompute=("full",), offload=(False,),
)  # fmt: skip


def deepspeed_chat(algorithm: str, size: str, gpus: int) -> float | None:
    """All models on all GPUs, one after another; ZeRO-3, resharded to slices for generation."""
    wanted, group = job(algorithm, size), paper_group(gpus)
    system = replace(HYBRIDFLOW, reshard="zero")
    rests, total = {}, 0.0
    shared = {"dp": gpus, "fsdp": gpus, "recompute": "full"}
    layout = Layout(micro_batch_tokens=2048, **shared)  # type: ignore[arg-type]
    usable = group.device.memory_bytes * (1 - system.spare)
    usable -= len(wanted.roles) * system.process_bytes
    extras = []
    for role in wanted.roles:
        count = trained_bytes if role.trains else scored_bytes
        held = count(role.model, layout, system)
        rests[role.name] = held.rest
        extras.append(held.peak - held.rest)
    if sum(rests.values()) + max(extras) > usable:
        return None
    for task in wanted.step.tasks:
        role = wanted.role(task.role)
        if task.kind is TaskKind.UPDATE:
            total += update_seconds(role.model, layout, wanted.work, group, system).total
        elif task.kind is TaskKind.SCORE:
            total += scoring_seconds(role.model, layout, wanted.work, group, system).total
        else:
            found = []
            for slices in (1, 2, 4, 8):
                way = replace(layout, generate_tp=slices)
                budget = usable - sum(rests.values())
                try:
                    sampling = Sampling(role.model, way, wanted.work, group, system, 1024)
                    sampled = sampling.seconds(budget)
                except NoRoomError:
                    continue
                found.append(sampled.total + reshard_seconds(role.model, way, group, system))
            if not found:
                return None
            total += min(found)
    return total


def openrlhf(algorithm: str, size: str, gpus: int) -> float | None:
    """Each model on devices of its own, generation apart from training; ZeRO-3; best allocation."""
    wanted = job(algorithm, size, system=replace(HYBRIDFLOW, reshard="copy"), freedom=ZERO)
    tasks = [
        Task(index=0, role="actor", kind=TaskKind.PUBLISH, method="publish_weights"),
        Task(index=1, role="rollout", kind=TaskKind.TAKE, method="update_weights", after=(0,)),
    ]
    for task in wanted.step.tasks:
        samples = task.kind is TaskKind.GENERATE
        tasks.append(
            replace(
                task,
                index=task.index + 2,
                role="rollout" if samples else task.role,
                after=(1,) if samples else tuple(one + 2 for one in task.after),
            )
        )
    roles = [replace(role, samples=False) for role in wanted.roles]
    rollout = Role(
        name="rollout",
        model=wanted.role("actor").model,
        samples=True,
        freedom=replace(ZERO, most_slices=8, cuts_over_data=(False,), same_generation=True),
    )
    names = [*(role.name for role in roles), "rollout"]
    apart = tuple((a, b) for index, a in enumerate(names) for b in names[index + 1 :])
    baseline = replace(
        wanted, roles=(*roles, rollout), step=Step(tuple(tasks)), wishes=Wishes(apart=apart)
    )
    return searched(baseline, gpus)


def nemo_aligner(algorithm: str, size: str, gpus: int) -> float | None:
    """Actor and reference on one half, critic and reward on the other; no keys and values."""
    system = replace(HYBRIDFLOW, reshard="none", has_kv_cache=False, shares_weights=True)
    together = [("actor", "reference"), ("critic", "reward")]
    if algorithm == "safe_rlhf":
        together.append(("critic", "cost"))
    half = gpus // 2
    baseline = job(
        algorithm,
        size,
        system=system,
        freedom=replace(PAPER_FREEDOM, same_generation=True),
        wishes=Wishes(
            together=tuple(together),
            apart=(("actor", "critic"),),
            devices={"actor": half, "critic": half},
        ),
    )
    return searched(baseline, gpus)


def searched(wanted: Job, gpus: int) -> float | None:
    found = Search(wanted, [paper_group(gpus)]).run(kept=1)
    return found.placements[0].period if found.placements else None


def speedups() -> Iterator[Row]:
    for algorithm, sizes in GPUS.items():
        for size, counts in sizes.items():
            for gpus in counts:
                ours = searched(job(algorithm, size), gpus)
                row: Row = {"algorithm": algorithm, "model": size, "gpus": gpus, "seconds": {}}
                row["seconds"]["hybridflow"] = _rounded(ours)
                baselines = {"deepspeed_chat": deepspeed_chat, "openrlhf": openrlhf}
                if algorithm != "remax":
                    baselines["nemo_aligner"] = nemo_aligner
                for name, baseline in baselines.items():
                    seconds = baseline(algorithm, size, gpus)
                    row["seconds"][name] = _rounded(seconds)
                    is_known = seconds is not None and ours is not None
                    row[name] = round(seconds / ours, 2) if is_known else None  # type: ignore[operator]
                if ours is not None:
                    row["tokens_per_s"] = round(2 * 1024 * 1024 / ours)
                yield row


def bands(rows: list[Row]) -> list[Row]:
    """Least and most speed-up by algorithm and model, beside the paper's."""
    found = []
    for algorithm, sizes in BANDS.items():
        for size, (least, most) in sizes.items():
            ours = [
                row[name]
                for row in rows
                if (row["algorithm"], row["model"]) == (algorithm, size)
                for name in AVERAGES
                if row.get(name) is not None
            ]
            found.append(
                {
                    "algorithm": algorithm,
                    "model": size,
                    "paper": [least, most],
                    "ours": [min(ours), max(ours)] if ours else None,
                    "overlaps": bool(ours) and min(ours) <= most and max(ours) >= least,
                    "error": [round(min(ours) / least - 1, 2), round(max(ours) / most - 1, 2)]
                    if ours
                    else None,
                }
            )
    return found


def averages(rows: list[Row]) -> list[Row]:
    """Mean and most speed-up of PPO over each baseline."""
    found = []
    for name, (mean, most) in AVERAGES.items():
        ours = [row[name] for row in rows if row["algorithm"] == "ppo" and row[name] is not None]
        found.append(
            {
                "baseline": name,
                "paper": [mean, most],
                "ours": [round(statistics.mean(ours), 2), max(ours)],
                "error": [
                    round(statistics.mean(ours) / mean - 1, 2),
                    round(max(ours) / most - 1, 2),
                ],
            }
        )
    return found


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None or seconds == float("inf") else round(seconds, 1)


def main() -> None:
    parts = {"placements": placements, "generation": generation, "transition": transition,
             "speedups": speedups}  # fmt: skip
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--tables", action="store_true", help="Markdown in place of JSON.")
    arguments = parser.parse_args()
    started = time.process_time()
    result: dict[str, Any] = {"benchmark": "paper_mapping", "fitted": "nothing"}
    for name in arguments.parts:
        result[name] = list(parts[name]())
    if "speedups" in result:
        result["bands"] = bands(result["speedups"])
        result["averages"] = averages(result["speedups"])
    result["cpu_s"] = round(time.process_time() - started, 1)
    result["versions"] = {"python": platform.python_version()}
    result["machine"] = {"cpus": os.cpu_count(), "arch": platform.machine()}
    if arguments.tables:
        for name, rows in result.items():
            if isinstance(rows, list):
                print(f"\n{name}\n\n{_table(rows)}")
    else:
        print(json.dumps(result))


def _table(rows: list[Row]) -> str:
    headings = list(rows[0])
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    lines += [f"| {' | '.join(_cell(row.get(one)) for one in headings)} |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(one)}" for key, one in value.items())
    if isinstance(value, list):
        return " ~ ".join(_cell(one) for one in value)
    return "-" if value is None else str(value)


if __name__ == "__main__":
    main()
