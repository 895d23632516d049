"""Jobs of arXiv 2409.19256, section 8: models, dataflows and the settings of its evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rolemesh.coordinator.mapping.job.job import Job, Role, Wishes
from rolemesh.coordinator.mapping.job.layouts import Freedom
from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.coordinator.mapping.job.systems import HYBRIDFLOW, System
from rolemesh.coordinator.mapping.job.tasks import Step, Task, TaskKind
from rolemesh.coordinator.mapping.job.work import Lengths, Work
from rolemesh.coordinator.mapping.machines.cluster import DeviceGroup, group_of
from rolemesh.coordinator.mapping.machines.coefficients import Coefficients
from rolemesh.coordinator.mapping.machines.devices import GBIT, device_of


def llama(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int = 32_000
) -> dict[str, Any]:
    """A config.json of that shape."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


LLAMAS: Mapping[str, dict[str, Any]] = {
    "tiny": llama(64, 128, 4, 4, 4, 512),
    "7B": llama(4096, 11008, 32, 32, 32),
    "13B": llama(5120, 13824, 40, 40, 40),
    "34B": llama(8192, 22016, 48, 64, 8),
    "70B": llama(8192, 28672, 80, 64, 8),
}
"""The paper's models (Llama; those of 34B and 70B have 8 key-value heads)."""

_CALLS: Mapping[str, list[tuple[str, str, tuple[int, ...]]]] = {
    "ppo": [
        ("actor", "generate", ()),
        ("critic", "compute_values", (0,)),
        ("reference", "compute_logprobs", (0,)),
        ("reward", "compute_reward", (0,)),
        ("critic", "update", (1, 2, 3)),
        ("actor", "update", (1, 2, 3)),
    ],
    "remax": [
        ("actor", "generate", ()),
        ("actor", "generate", ()),
        ("reference", "compute_logprobs", (0,)),
        ("reward", "compute_reward", (0,)),
        ("reward", "compute_reward", (1,)),
        ("actor", "update", (2, 3, 4)),
    ],
    "safe_rlhf": [
        ("actor", "generate", ()),
        ("critic", "compute_values", (0,)),
        ("reference", "compute_logprobs", (0,)),
        ("reward", "compute_reward", (0,)),
        ("cost", "compute_cost", (0,)),
        ("critic", "update", (1, 2, 3, 4)),
        ("actor", "update", (1, 2, 3, 4)),
    ],
    "grpo": [
        ("actor", "generate", ()),
        ("reference", "compute_logprobs", (0,)),
        ("reward", "compute_reward", (0,)),
        ("actor", "update", (1, 2)),
    ],
}

_KINDS = {"generate": TaskKind.GENERATE, "update": TaskKind.UPDATE}


def step(algorithm: str) -> Step:
    """The dataflow of an algorithm, as the paper's Fig. 1 draws it; advantages cost nothing."""
    return Step(
        tuple(
            Task(
                index=index,
                role=role,
                kind=_KINDS.get(method, TaskKind.SCORE),
                method=method,
                after=after,
            )
            for index, (role, method, after) in enumerate(_CALLS[algorithm])
        )
    )


PAPER_WORK = Work(
    prompts=1024,
    prompt_tokens=1024,
    completions=Lengths.fixed(1024),
    mini_batch_rows=128,
)
"""1,024 prompts of 1,024 tokens, completions of exactly 1,024, 8 updates of an epoch."""

PAPER_FREEDOM = Freedom(
    cuts_over_data=(False,),
    generate_stages=True,
    micro_batch_tokens=(2048, 4096, 8192),
    recompute=("full",),
    offload=(False,),
)
"""Megatron's 3D layouts; activations are recomputed, since the paper does not say."""


def paper_group(gpus: int, coefficients: Coefficients | None = None) -> DeviceGroup:
    """Machines of 8 A100-80GB, 200 Gbit/s between them."""
    return group_of(
        device_of("a100-80"),
        gpus,
        coefficients=coefficients,
        per_machine=8,
        network_bandwidth=200 * GBIT,
    )


def job(
    algorithm: str,
    sizes: str | Mapping[str, str],
    *,
    system: System = HYBRIDFLOW,
    freedom: Freedom = PAPER_FREEDOM,
    work: Work = PAPER_WORK,
    wishes: Wishes | None = None,
) -> Job:
    """An algorithm on models of a size, or of one for each role."""
    dataflow = step(algorithm)
    roles = []
    for name in dataflow.roles:
        size = sizes if isinstance(sizes, str) else sizes[name]
        head = "lm_head" if name in ("actor", "reference") else "score"
        roles.append(
            Role(
                name=name,
                model=Model.from_config(LLAMAS[size], head=head),
                trains=name in ("actor", "critic"),
                samples=name == "actor",
                freedom=freedom,
            )
        )
    return Job(
        roles=tuple(roles), step=dataflow, work=work, system=system, wishes=wishes or Wishes()
    )
