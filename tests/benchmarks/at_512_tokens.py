"""Measures what each part of a policy's update saves at rows of 512 tokens, alone and together.

    python tests/benchmarks/at_512_tokens.py [--model .models/SmolLM2-135M-Instruct] [--rows 4]
        [--prompt 128] [--completion 384] [--layers N] [--rounds 3] [--threads 2] [--device cpu]
        [--compute-dtype float32]

One pass is advantages by GAE, then forward and backward of the PPO loss over all rows at once,
with entropy as a metric; the optimizer's own step is in none. The naive way is what a plain script
does: logits of all tokens, a softmax of them, a loop over time steps for GAE, nothing computed
again. Each other way changes what its name says, and "ours" has our defaults:

    head         log-probs and entropy from chunks, never all logits
    advantages   GAE of packed rows as a scan
    selective    attention computed again in the backward pass
    full         whole layers computed again
    ours         head and advantages; ours_selective and ours_full with recomputation besides
    ours_triton  on a GPU, ours by Triton's kernels; the others go without them

Each way runs in a process of its own, round by round, since the memory that a process holds is
measured there: resident on a CPU, of torch's allocator on a GPU. Prints one JSON line; seconds and
bytes are medians, "saved" is the part less than naive.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.token_batches import token_batch

from rolemesh.engine.algorithms.estimators.advantages import gae
from rolemesh.engine.algorithms.losses.base import LossScale, ModelOutputs, make_loss
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.hardware.memory import PhaseMemory
from rolemesh.engine.kernels.choice import KERNELS_VARIABLE
from rolemesh.engine.models.causal_lm import CausalLm
from rolemesh.engine.packing.packed_rows import pack_rows
from rolemesh.engine.specs import ModelSpec, PpoPolicyLossSpec

GAMMA, LAM = 1.0, 0.95
WAYS: dict[str, dict[str, Any]] = {
    "naive": {},
    "head": {"head": True},
    "advantages": {"advantages": True},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "ours": {"head": True, "advantages": True},
    "ours_selective": {"head": True, "advantages": True, "recompute": "selective"},
    "ours_full": {"head": True, "advantages": True, "recompute": "full"},
    "ours_triton": {"head": True, "advantages": True, "kernels": "triton"},
}


class Step:
    """One way to make the gradients of an update."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        *,
        head: bool = False,
        advantages: bool = False,
        recompute: Literal["none", "selective", "full"] = "none",
        kernels: str = "torch",
    ) -> None:
        os.environ[KERNELS_VARIABLE] = kernels
        self.device = torch.device(arguments.device)
        self.model = CausalLm(
            ModelSpec(
                path=arguments.model,
                compute_dtype=arguments.compute_dtype,
                recompute=recompute,
                num_layers=arguments.layers,
                share_prefixes="never",
            ),
            device=self.device,
        )
        self.batch = token_batch(
            prompt_lengths=[arguments.prompt] * arguments.rows,
            completion_lengths=[arguments.completion] * arguments.rows,
            vocab_size=self.model.config.vocab_size,
        )
        self.shape = (arguments.rows, arguments.completion)
        self.has_head, self.has_scan = head, advantages
        self.loss = make_loss(PpoPolicyLossSpec())

    def run(self) -> float:
        """Adds the gradients; returns the loss."""
        column = self.batch["values"]
        assert column.offsets is not None
        rewards = torch.zeros_like(column.values)
        rewards[column.offsets[1:] - 1] = 1.0
        mask = torch.ones_like(rewards, dtype=torch.bool)
        advantages = (
            gae(rewards, column.values, mask, column.offsets, gamma=GAMMA, lam=LAM)[0]
            if self.has_scan
            else self._looped(rewards, column.values)
        )
        rows = pack_rows(self.batch, self.device)
        states_ND = rows.states(self.model.stage_forward(rows, None))
        logprobs_N, entropy_N = self._scored(states_ND, rows.targets_U)
        batch = Experience(
            {
                name: Column(ColumnKind.COMPLETION, values, column.offsets)
                for name, values in (
                    ("logprobs", torch.full_like(rewards, -6.0)),
                    ("advantages", advantages),
                    ("loss_mask", mask),
                )
            }
        )
        outputs = ModelOutputs(logprobs_N=logprobs_N, entropy_N=entropy_N)
        loss, _ = self.loss(outputs, batch, LossScale.of(batch))
        loss.backward()
        return float(loss.detach())

    def drop_gradients(self) -> None:
        """Between two passes, as an optimizer does."""
        self.model.zero_grad(set_to_none=True)

    def _scored(
        self, states_ND: torch.Tensor, targets_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.has_head:
            from rolemesh.engine.models.causal_lm import COMPUTE_DTYPES
            from rolemesh.engine.models.vocabulary.logprobs import token_logprobs

            return token_logprobs(
                states_ND.to(self.model.vocabulary_VD.dtype),
                self.model.vocabulary_VD,
                targets_N,
                compute_dtype=COMPUTE_DTYPES[self.model.spec.compute_dtype],
                with_entropy=True,
            )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.model.autocasts):
            logits_NV = torch.nn.functional.linear(states_ND, self.model.vocabulary_VD)
        table_NV = torch.log_softmax(logits_NV.float(), -1)
        logprobs_N = table_NV.gather(1, targets_N[:, None]).squeeze(1)
        with torch.no_grad():
            entropy_N = -(table_NV.exp() * table_NV).sum(-1)
        return logprobs_N, entropy_N

    def _looped(self, rewards_N: torch.Tensor, values_N: torch.Tensor) -> torch.Tensor:
        rewards_BT, values_BT = rewards_N.view(self.shape), values_N.view(self.shape)
        advantage_B = torch.zeros(self.shape[0])
        next_value_B = torch.zeros(self.shape[0])
        found = []
        for t in range(self.shape[1] - 1, -1, -1):
            delta_B = rewards_BT[:, t] + GAMMA * next_value_B - values_BT[:, t]
            advantage_B = delta_B + GAMMA * LAM * advantage_B
            next_value_B = values_BT[:, t]
            found.append(advantage_B)
        return torch.stack(found[::-1], 1).flatten()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One way, in this process: seconds and bytes of the second pass; the first one allocates."""
    torch.set_num_threads(arguments.threads)
    step = Step(arguments, **WAYS[arguments.way])
    loss = step.run()
    step.drop_gradients()
    is_cuda = step.device.type == "cuda"
    with PhaseMemory(arguments.device) as memory:
        began, computed = time.perf_counter(), time.process_time()
        step.run()
        if is_cuda:
            torch.cuda.synchronize()
        clock_s, cpu_s = time.perf_counter() - began, time.process_time() - computed
    weights = sum(weight.numel() * weight.element_size() for weight in step.model.parameters())
    return {
        "loss": loss,
        "clock_s": clock_s,
        "cpu_s": cpu_s,
        "peak_bytes": memory.peak_bytes,
        "weights_bytes": weights,
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path(".models/SmolLM2-135M-Instruct"))
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--completion", type=int, default=384)
    parser.add_argument("--layers", type=int, default=None, help="keep only the first layers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compute-dtype", default=None, help="bfloat16 on a GPU, else float32")
    parser.add_argument("--way", choices=WAYS, help="only this one, in this process")
    arguments = parser.parse_args()
    is_cuda = arguments.device != "cpu"
    arguments.compute_dtype = arguments.compute_dtype or ("bfloat16" if is_cuda else "float32")
    if arguments.way:
        print(json.dumps(measure(arguments)))
        return 0
    ways = [way for way in WAYS if is_cuda or WAYS[way].get("kernels") != "triton"]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way in ways:
            completed = subprocess.run(
                [
                    *(sys.executable, __file__, *sys.argv[1:], "--way", way),
                    *("--device", arguments.device, "--compute-dtype", arguments.compute_dtype),
                ],
                stdout=subprocess.PIPE,
                check=True,
                timeout=1800,
            )
            found[way].append(json.loads(completed.stdout.splitlines()[-1]))
            # Minutes go by between points.
            print(json.dumps({"way": way, **found[way][-1]}), file=sys.stderr, flush=True)
    medians = {
        way: {name: statistics.median(one[name] for one in runs) for name in runs[0]}
        for way, runs in found.items()
    }
    naive = medians["naive"]
    for way, numbers in medians.items():
        # All compute the same loss, or what is compared is not the same work.
        if abs(numbers["loss"] - naive["loss"]) > 0.01 * max(1.0, abs(naive["loss"])):
            raise RuntimeError(f"{way} has loss {numbers['loss']}, naive {naive['loss']}")
    result = {
        "benchmark": "at_512_tokens",
        "config": {
            "model": arguments.model.name,
            **{name: getattr(arguments, name) for name in ("rows", "prompt", "completion")},
            **{name: getattr(arguments, name) for name in ("layers", "rounds", "compute_dtype")},
        },
        "median": medians,
        "spread_cpu_s": {
            way: [min(one["cpu_s"] for one in runs), max(one["cpu_s"] for one in runs)]
            for way, runs in found.items()
        },
        "saved": {
            way: {
                name: round(1 - numbers[name] / naive[name], 3)
                for name in ("clock_s", "cpu_s", "peak_bytes")
            }
            for way, numbers in medians.items()
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": {
            "processor": platform.machine(),
            "device": torch.cuda.get_device_name() if is_cuda else "cpu",
            "cores": os.cpu_count(),
            "torch_threads": arguments.threads,
        },
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
