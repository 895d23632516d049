"""Updates of rows of one length: tokens/s, MFU, peak of memory against its estimate, kernels."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from minutes_tests import run_tests
from minutes_tools import (
    IS_REHEARSAL,
    SHAPE,
    Found,
    drop_memory,
    make_trainer,
    model_folder,
    peak_flops,
    rows_of,
    seconds_of,
    update,
    use_gpu,
)

KERNELS_VARIABLE = "ROLEMESH_KERNELS"

ESTIMATED = {
    f"{numerics}, recompute {recompute}": {"numerics": numerics, "recompute": recompute}
    for numerics, recompute in (
        ("fast", "none"),
        ("exact", "none"),
        ("exact", "full"),
        ("fast", "full"),
    )
}
"""Those whose memory `rolemesh fit` tells."""
FUSED = "fast, recompute none, Triton"
SETTINGS: dict[str, dict[str, str]] = {
    **ESTIMATED,
    # Last: a kernel that writes where it should not takes no other figure with it.
    FUSED: {"numerics": "fast", "recompute": "none", "kernels": "triton"},
}
PROFILED = ("fast, recompute none", "exact, recompute full", FUSED)
DEAREST = 15
"""Kernels that are named."""
PROMPT = 16
"""Tokens: nearly all of a row is completion, whose log-probs the head computes."""
MFU_FORMULA = (
    "tokens/s x (6 x parameters + 6 x layers x heads x head_dim x row length) / peak FLOP/s: "
    "attention by its causal half, nothing that is computed again, the tied embedding once"
)


def speed_fixed(found: Found) -> None:
    """One row of the step's tokens, by numerics and recomputation.

    The estimate is that of `rolemesh fit`, of two passes, which find gradients there already; so
    is the peak.
    """
    peak = peak_flops()
    found["shape"] = vars(SHAPE)
    found["mfu"] = {"formula": MFU_FORMULA, "peak_flops": peak}
    if IS_REHEARSAL:
        found.unrehearsed("mfu", "a CPU's peak is not known")
        found.unrehearsed("peak", "torch counts a GPU's memory alone; the estimate is made")
    estimates = Estimates()
    settings: dict[str, Any] = {}
    profiles: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        if name == FUSED and importlib.util.find_spec("triton") is None:
            settings[name] = {"skipped": "Triton is not installed"}
            continue
        drop_memory()
        os.environ[KERNELS_VARIABLE] = setting.get("kernels", "torch")
        try:
            settings[name] = measured(name, setting, peak, profiles)
        except torch.cuda.OutOfMemoryError as error:
            settings[name] = {"no_room": str(error)[:300]}
        except Exception as error:  # Triton's compiler has many of its own
            if name != FUSED:
                raise
            settings[name] = {"failed": f"{type(error).__name__}: {error}"[:3000]}
        found["settings"], found["dearest"] = settings, profiles
    for name, predicted in estimates.answered().items():
        one = settings[name]
        one["fit_bytes"] = predicted
        if "peak_bytes" in one:
            one["peak_over_fit"] = round(one["peak_bytes"] / predicted, 4)
    found["settings"] = settings
    if "failed" in settings[FUSED]:
        raise RuntimeError(f"Triton's kernels: {settings[FUSED]['failed']}")
    if not any("tokens_per_s" in one for one in settings.values()):
        raise RuntimeError("no setting had room")


def deterministic(found: Found) -> None:
    """What it costs to have the same bits, and that they are: in a process that began so."""
    from rolemesh.engine.hardware.devices import be_deterministic

    setting = SETTINGS["exact, recompute none"]
    told = {}
    for name, wanted in (("free", False), ("the same bits", True)):
        drop_memory()
        be_deterministic(use_gpu(), wanted)
        told[name] = measured(name, setting, peak_flops(), {})
        found["updates"] = told
    if IS_REHEARSAL:
        found.unrehearsed("deterministic", "a CPU gives the same bits in any case")
    run_tests(found, "test_deterministic_cuda")


def measured(
    name: str, setting: dict[str, str], peak: float | None, profiles: dict[str, Any]
) -> dict[str, Any]:
    """Speed and peak of a setting."""
    held = 0 if IS_REHEARSAL else torch.cuda.memory_allocated()
    trainer = make_trainer(
        setting["numerics"],
        recompute=setting["recompute"],
        micro_batch_tokens=SHAPE.tokens,
    )
    # Triton's interpreter takes its time.
    is_slow = IS_REHEARSAL and "kernels" in setting
    length = 32 if is_slow else SHAPE.tokens
    row = rows_of([PROMPT], [length - PROMPT])
    first_s = seconds_of(lambda: update(trainer, row))
    metrics = update(trainer, row)
    seconds = [seconds_of(lambda: update(trainer, row)) for _ in range(1 if is_slow else 3)]
    per_second = length / statistics.median(seconds)
    told: dict[str, Any] = {
        "first_s": round(first_s, 3),
        "seconds": [round(one, 4) for one in seconds],
        "tokens_per_s": round(per_second),
        "loss": metrics["loss"],
        "grad_norm": metrics["grad_norm"],
    }
    if peak is not None:
        told["mfu"] = round(per_second * flops_per_token(trainer) / peak, 4)
    if name in PROFILED and not is_slow:
        profiles[name] = dearest(trainer, row)
    two = rows_of([PROMPT] * 2, [length - PROMPT] * 2)
    if IS_REHEARSAL:
        update(trainer, two)
        return told
    torch.cuda.reset_peak_memory_stats()
    update(trainer, two)
    told["peak_bytes"] = torch.cuda.max_memory_allocated() - held
    told["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return told


def flops_per_token(trainer: Any) -> float:
    """Forward and backward, see MFU_FORMULA."""
    parameters = sum(weight.numel() for _, weight in trainer.named_weights())
    return 6 * parameters + 6 * SHAPE.layers * SHAPE.heads * SHAPE.head_dim * SHAPE.tokens


def dearest(trainer: Any, batch: Any) -> list[dict[str, Any]]:
    """What an update spends its time in, on the device."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] if IS_REHEARSAL else [ProfilerActivity.CUDA]
    with profile(activities=kinds) as profiler:
        seconds = seconds_of(lambda: update(trainer, batch))
    time_of = "self_cpu_time_total" if IS_REHEARSAL else "self_device_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, time_of))
    total = sum(getattr(event, time_of) for event in events)
    return [
        {
            "kernel": event.key[:100],
            "calls": event.count,
            "ms": round(getattr(event, time_of) / 1e3, 3),
            "share": round(getattr(event, time_of) / max(total, 1e-9), 4),
        }
        for event in events[:DEAREST]
    ] + [{"kernel": "all, of the seconds of the update", "ms": round(total / 1e3, 3), "s": seconds}]


class Estimates:
    """What `rolemesh fit` says of the settings, asked beside the device's work.

    In several processes where there are cores: one real shape takes half a minute of computing.
    """

    def __init__(self) -> None:
        names = list(ESTIMATED)
        count = min(len(names), max(1, len(os.sched_getaffinity(0)) // 2))
        self._processes = [_asked(names[number::count]) for number in range(count)]

    def answered(self) -> dict[str, int]:
        """Bytes at the peak, by setting; waits for what is still computed."""
        found = {}
        for process in self._processes:
            for line in process.communicate()[0].splitlines():
                answer = json.loads(line)
                if answer["type"] != "role":
                    raise RuntimeError(f"an estimate failed: {answer}")
                found[answer["role"]] = answer["peak"]
        return found


def _asked(names: Sequence[str]) -> subprocess.Popen[str]:
    """A process that estimates these settings."""
    models = [
        {
            "role": name,
            "kind": "policy",
            "model": {
                "path": str(model_folder()),
                "recompute": SETTINGS[name]["recompute"],
                "micro_batch_tokens": SHAPE.tokens,
            },
            "layout": {},
            "optimizer": {},
            "loss": {"type": "ppo_policy"},
            "numerics": SETTINGS[name]["numerics"],
            "row_tokens": SHAPE.tokens,
            "prompt_tokens": PROMPT,
        }
        for name in names
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "rolemesh.services.preview.memory"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    kind = "cpu" if IS_REHEARSAL else "cuda"
    process.stdin.write(json.dumps({"device": kind, "models": models}))
    process.stdin.close()
    process.stdin = None
    return process
