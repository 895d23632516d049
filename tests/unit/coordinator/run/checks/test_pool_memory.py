"""Tests of what GPUs of a pool hold while roles take turns, and of what is advised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rolemesh.coordinator.mapping.job.systems import PROCESS_BYTES
from rolemesh.coordinator.recipe.loading import read_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.pool_memory import (
    PoolFound,
    RoleFound,
    gpu_cautions,
    pool_memory,
)

GIB = 2**30


def recipe(*settings: str, model: Path = Path(".models/none")) -> Recipe:
    text = f"""
run: {{name: fit, steps: 1, prompts_per_step: 8}}
algorithm: {{type: grpo, sampling: {{samples_per_prompt: 2}}}}
actor:
  model: {{path: {model}, recompute: none}}
  rollout: {{type: vllm, gpu_memory_utilization: 0.5}}
  data: {{type: jsonl, path: data.jsonl}}
reference: {{model: {{path: {model}}}}}
reward: {{source: {{type: arithmetic}}}}
pools:
  gpus: {{devices: ['cuda:0'], roles: [actor, reference]}}
  judges: {{devices: [cpu], roles: [reward]}}
"""
    return read_recipe(text, "test", overrides=settings)


def actor(**changes: Any) -> RoleFound:
    at_peak = {"weights": 4 * GIB, "optimizer": 8 * GIB, "activations": 12 * GIB}
    return RoleFound(
        **{
            "role": "actor",
            "rest": 12 * GIB,
            "peak": 24 * GIB,
            "at_peak": at_peak,
            "trains": True,
            "sampler": {"least": 5 * GIB},
            **changes,
        }
    )


REFERENCE = RoleFound(role="reference", rest=4 * GIB, peak=6 * GIB)


def found(given: Recipe, gpu: int, **changes: Any) -> PoolFound:
    roles = {"actor": actor(**changes), "reference": REFERENCE}
    return pool_memory(given, "gpus", roles, gpu * GIB)


def test_roles_that_sleep_leave_only_their_processes() -> None:
    totals = {moment.what: moment.total for moment in found(recipe(), 40).moments}
    assert totals == {
        "actor trains": 24 * GIB + 2 * PROCESS_BYTES,
        "actor samples": 12 * GIB + 20 * GIB + 2 * PROCESS_BYTES,
        "reference scores": 6 * GIB + 2 * PROCESS_BYTES,
    }


def test_roles_that_never_sleep_stay_with_sampler_and_all() -> None:
    given = recipe("pools.gpus.sleep=never")
    totals = {moment.what: moment.total for moment in found(given, 40).moments}
    assert totals["reference scores"] == (6 + 12 + 20) * GIB + 2 * PROCESS_BYTES
    assert totals["actor trains"] == (24 + 4) * GIB + 2 * PROCESS_BYTES


def test_weights_that_come_by_an_exchange_lie_beside_the_old_ones() -> None:
    apart = (
        "rollout.model.path=.models/none",
        "rollout.rollout={type: vllm, gpu_memory_utilization: 0.5}",
        "rollout.data={type: jsonl, path: data.jsonl}",
        "pools.samplers={devices: ['cuda:1'], roles: [rollout]}",
    )
    sampler = RoleFound(role="rollout", sampler={"least": 5 * GIB, "arriving": 3 * GIB})
    totals = []
    for weights in ("grpc", "nccl"):
        given = recipe(*apart, f"schedule.sampler={{type: sync, weights: {weights}}}")
        (moment,) = pool_memory(given, "samplers", {"rollout": sampler}, 40 * GIB).moments
        totals.append(moment.total)
    assert totals == [20 * GIB + PROCESS_BYTES, 23 * GIB + PROCESS_BYTES]


def test_what_fits_gets_no_advice() -> None:
    whole = found(recipe("actor.rollout.gpu_memory_utilization=0.3"), 40)
    assert whole.worst.what == "actor samples" or whole.worst.what == "actor trains"
    assert whole.headroom == 40 * GIB - whole.worst.total > 0
    assert whole.advice == () or whole.advice == []


def test_advice_names_keys_in_order_with_a_share_that_fits() -> None:
    # Sampling is the worst moment: 12 + 2 GiB beside a half of 30 GiB.
    whole = found(recipe(), 30, peak=15 * GIB)
    assert whole.worst.what == "actor samples"
    key, _, share = whole.advice[0].partition(": ")
    assert key == "actor.rollout.gpu_memory_utilization"
    again = found(recipe(f"{key}={share}"), 30, peak=15 * GIB)
    sampling = next(moment for moment in again.moments if moment.what == "actor samples")
    assert sampling.total <= 0.9 * 30 * GIB
    training = found(recipe("actor.rollout.gpu_memory_utilization=0.2"), 20)
    assert training.headroom < 0
    assert [line.partition(":")[0] for line in training.advice] == [
        "actor.model.recompute",
        "actor.model.micro_batch_tokens",
        "actor.optimizer.offload",
        "actor.train.dp or .tp",
        "actor.rollout.gpu_memory_utilization",  # 5 GiB of 20 do not lie in a fifth
    ]


def test_each_advised_setting_is_a_key_of_the_recipe() -> None:
    for line in found(recipe(), 20).advice:
        key, _, value = line.partition(": ")
        value = value.partition(" (")[0]
        if " or " in key or not value or "least" in value or "less" in value or "more" in value:
            continue
        recipe(f"{key}={value}")


def test_replicas_are_advised_to_cut_rows() -> None:
    given = recipe("actor.train.dp=4", "pools.gpus.devices=['cuda:0','cuda:1','cuda:2','cuda:3']")
    keys = [line.partition(" (")[0] for line in found(given, 20).advice]
    assert "actor.train.cp: 2" in keys
    assert "cp: 4" in " ".join(
        found(
            recipe(
                *("actor.train.dp=4", "actor.train.cp=2"),
                "pools.gpus.devices=['cuda:0','cuda:1','cuda:2','cuda:3']",
            ),
            20,
        ).advice
    )


def test_slices_are_advised_to_share_tokens_before_layers_are_recomputed() -> None:
    given = (
        "pools.gpus.devices=['cuda:0', 'cuda:1']",
        "actor.train={tp: 2}",
        "reference.layout={tp: 2}",
        "actor.rollout.gpu_memory_utilization=0.2",
    )
    key, _, value = found(recipe(*given), 20).advice[0].partition(": ")
    assert key == "actor.model.sequence_parallel"
    taken = found(recipe(*given, f"{key}={value.partition(' (')[0]}"), 20)
    assert taken.advice[0].startswith("actor.model.recompute")


def test_sleep_is_advised_first_where_roles_stay_awake() -> None:
    whole = found(recipe("pools.gpus.sleep=never"), 30)
    assert whole.advice[0].startswith("pools.gpus.sleep: always")


def test_model_files_alone_show_what_cannot_fit(tmp_path: Path) -> None:
    write_header(tmp_path, 1_000_000_000)
    given = recipe(model=tmp_path)
    services = dict.fromkeys(("actor", "reference", "reward"))
    (caution,) = gpu_cautions(given, services, 16 * 10**9)
    assert "pools.gpus" in caution.text
    assert "rolemesh fit" in caution.remedy
    assert list(gpu_cautions(given, services, 80 * 10**9)) == []


def write_header(folder: Path, num_parameters: int) -> None:
    """A safetensors file that names a tensor of so many elements, and holds none."""
    header = b'{"w": {"dtype": "BF16", "shape": [%d], "data_offsets": [0, 0]}}' % num_parameters
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
