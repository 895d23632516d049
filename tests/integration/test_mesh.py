"""The whole mesh on loopback: the real command line, real services, a tiny model."""

import json
import os
import re
import signal
import time
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import warm_processes
from support.commands import command_of
from support.mesh_runs import ROLES, CliRun, tiny_model, tiny_recipe
from support.run_results import unexplained
from support.tiny_models import write_tiny_classifier
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolemesh.v1 import worker_pb2, worker_pb2_grpc

START_S = 240
"""A service imports torch in seconds on a quiet machine; the machine is shared."""

LOSS_DEADLINE_S = 10
"""What the issue promises: a lost service ends the run within this time."""

MAX_TRAFFIC_CHANGE = 0.1
"""Counts and durations in an answer take a few bytes more when they are larger; tokens do not."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def start(tmp_path):
    """Starts runs and sees to it that nothing of them is left."""
    runs = []

    def begin(recipe):
        folder = tmp_path / f"run-{len(runs)}"
        folder.mkdir()
        runs.append(CliRun(recipe, folder))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """One run to its end, with what was seen of its processes on the way."""
    folder = tmp_path_factory.mktemp("finished")
    recipe = tiny_recipe(model, run__steps=3, run__checkpoint__every_steps=1)
    # The coordinator starts by itself: what it has not imported is looked at. `env` becomes it.
    run = CliRun(recipe, folder, within=["env"])
    try:
        run.wait_until(lambda: len(run.metrics()) >= 1, START_S)
        family = [psutil.Process(run.process.pid), *run.descendants()]
        run.seen_commands = [command_of(process) for process in family]
        run.seen_maps = Path(f"/proc/{run.process.pid}/maps").read_text()
        run.seen_family = [*family, *forks_of(family)]
        run.answers_to_strangers = {role: _answer_to_a_stranger(run, role) for role in ROLES}
        assert run.wait(START_S) == 0, run.output
        yield run
    finally:
        run.close()


def forks_of(family):
    """What works behind the processes of a run, where they stand in front of it."""
    return [psutil.Process(warm_processes.forked(process.pid)) for process in family]


def _answer_to_a_stranger(run, role):
    """Code with which a service of the run answers another user's program on this machine."""
    log = (run.out / "logs" / f"{role}.log").read_text()
    address = re.search(rf"serving {role} at (\S+)", log)[1]
    with grpc.insecure_channel(address) as channel:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            worker.Drain(worker_pb2.DrainRequest(exit=True), timeout=10)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def test_services_of_a_run_take_no_calls_of_other_programs(finished):
    # And the run went on to its end, as `finished` asserts.
    assert finished.answers_to_strangers == dict.fromkeys(ROLES, grpc.StatusCode.UNAVAILABLE)


def test_six_processes_serve_a_run(finished):
    roles = [
        re.search(r"rolemesh\.services\.(\w+)", " ".join(command))
        for command in finished.seen_commands
    ]
    assert sorted(match[1] for match in roles if match) == sorted(ROLES)
    # Beside them the coordinator and the store, which may stand behind a small wrapper.
    assert any("valkey" in " ".join(command) for command in finished.seen_commands)
    assert len(finished.seen_commands) == 6


def test_the_coordinator_has_no_torch(finished):
    assert "libtorch" not in finished.seen_maps
    # The pattern itself finds torch where it is.
    torch.zeros(1)
    assert "libtorch" in Path("/proc/self/maps").read_text()


def test_nothing_outlives_a_run(finished):
    # A fork is ended by the end of the process in front of it, a moment later.
    assert psutil.wait_procs(finished.seen_family, timeout=10)[1] == []
    pids = {process.pid for process in finished.seen_family}
    left = [
        name
        for name in os.listdir("/dev/shm")
        if (match := re.match(r"rolemesh-(\d+)-", name)) and int(match[1]) in pids
    ]
    assert left == []


def test_the_reference_explains_every_metric_of_a_real_run(finished):
    records = finished.metrics()
    assert {"kl/mean", "actor/grad_norm", "held_out/score"} <= {*records[0], *records[-1]}
    assert unexplained(records) == []


def test_a_run_leaves_what_it_promises(finished):
    out = finished.out
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "model", "tensorboard"):
        assert (out / name).exists(), name
    for role in ROLES:
        assert (out / "logs" / f"{role}.log").stat().st_size > 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["state"] == "succeeded"
    assert (summary["seed"], summary["steps"]) == (3, 3)
    for moment in ("before", "after"):
        assert summary["held_out"][moment]["num_prompts"] == 4
        assert summary["held_out"][moment]["standard_error"] >= 0
    assert "torch" in summary["versions"]["actor"]


def test_each_step_says_what_it_did_and_where_the_time_went(finished):
    steps = finished.metrics()
    assert [record["step"] for record in steps] == [1, 2, 3]
    for record in steps:
        for name in (
            "reward/mean",
            "kl/mean",
            "entropy",
            "completion_length/mean",
            "tokens_per_second",
            "sampler_logprob_diff_mean",
            "sampler_logprob_diff_max",
            "effective_sample_fraction",
            *(
                f"time/{phase}"
                for phase in (
                    *("generate", "values", "reference", "reward", "advantages"),
                    *("update_critic", "update_actor", "weight_sync", "step"),
                )
            ),
        ):
            assert name in record, f"{name} is not in {sorted(record)}"
        # float32, and the hf sampler computes what the trainer computes.
        assert record["sampler_logprob_diff_mean"] < 1e-4
        # All tokens are of the weights that the update began with.
        assert record["age/0/fraction"] == pytest.approx(1)
        assert 0 <= record["age/0/sampler_kl_k3"] < 1e-7


def test_the_exported_folder_loads_and_is_what_the_last_checkpoint_holds(finished):
    exported = AutoModelForCausalLM.from_pretrained(finished.out / "model", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(finished.out / "model").chat_template
    checkpoint = max((finished.out / "checkpoints").iterdir(), key=lambda path: path.name)
    assert checkpoint.name.endswith("3")
    assert (checkpoint / "COMMITTED").exists()
    saved = {}
    for shard in (checkpoint / "actor").glob("weights*.safetensors"):
        saved |= load_file(shard)
    weights = {name.removeprefix("weights."): value for name, value in saved.items()}
    parameters = dict(exported.named_parameters())
    assert len(weights) == len(parameters)
    for name, parameter in parameters.items():
        # The export is bfloat16: eight bits of mantissa.
        torch.testing.assert_close(parameter, weights[name], rtol=2**-8, atol=1e-6)


def test_training_changed_the_policy(finished, model):
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(finished.out / "model", dtype=torch.float32)
    change = max(
        float((x - y).detach().abs().max())
        for x, y in zip(before.parameters(), after.parameters(), strict=True)
    )
    # Six optimizer steps of AdamW at 1e-4 move a weight by up to 6e-4 each; bf16 rounds smaller.
    assert change > 1e-4


@pytest.mark.slow
def test_far_longer_completions_leave_the_coordinator_s_bytes_alone(start, model):
    last = {}
    for max_new_tokens in (2, 200):
        recipe = tiny_recipe(
            model,
            algorithm__sampling__max_new_tokens=max_new_tokens,
            run__evaluation={"num_prompts": 0},
        )
        run = start(recipe)
        assert run.wait(START_S) == 0, run.output
        last[max_new_tokens] = run.metrics()[-1]
    completions = {limit: record["completion_length/mean"] for limit, record in last.items()}
    # The tiny model draws nearly evenly from its vocabulary and seldom ends by itself.
    assert completions[200] > 50 * completions[2], completions
    moved = {
        limit: record["coordinator/sent_bytes"] + record["coordinator/received_bytes"]
        for limit, record in last.items()
    }
    assert moved[2] > 0
    assert abs(moved[200] / moved[2] - 1) < MAX_TRAFFIC_CHANGE, moved


def test_a_killed_service_ends_a_run_that_does_not_recover(start, model):
    role = "actor"
    recipe = tiny_recipe(model, run__steps=100000, run__recovery={"attempts": 0})
    run = start(recipe)
    run.wait_until(lambda: len(run.metrics()) >= 1, START_S)
    family = run.descendants()
    forks = forks_of(family)
    victim = run.role_process(role)
    victim.send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    assert run.wait(LOSS_DEADLINE_S) == 1, run.output
    assert time.monotonic() - killed_at < LOSS_DEADLINE_S
    assert f"{role} rank 0" in run.stderr + run.stdout
    assert f"pid {victim.pid}" in run.stderr + run.stdout
    assert "signal 9" in run.stderr + run.stdout
    # A fork is ended by the end of the process in front of it, a moment later.
    _, alive = psutil.wait_procs([*family, *forks], timeout=10)
    assert alive == []
    summary = json.loads((run.out / "summary.json").read_text())
    assert summary["state"] == "failed"
    assert role in summary["failure"]


def test_a_killed_coordinator_leaves_no_process(start, model):
    run = start(tiny_recipe(model, run__steps=100000))
    run.wait_until(lambda: len(run.metrics()) >= 1, START_S)
    family = run.descendants()
    assert len(family) == 5
    forks = forks_of(family)
    run.process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs([*family, *forks], timeout=30)
    assert alive == []


def test_an_interrupt_ends_the_run_after_the_step_with_everything_saved(start, model):
    run = start(tiny_recipe(model, run__steps=100000))
    run.wait_until(lambda: len(run.metrics()) >= 1, START_S)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.output
    summary = json.loads((run.out / "summary.json").read_text())
    assert summary["state"] == "stopped"
    steps = len(run.metrics())
    assert summary["steps"] == steps
    assert (run.out / "model" / "config.json").exists()
    assert [path.name for path in (run.out / "checkpoints").glob("*/COMMITTED")] == ["COMMITTED"]


def test_a_sequence_classifier_judges_as_a_service_of_its_own(start, model, tmp_path):
    judge = write_tiny_classifier(tmp_path / "judge", seed=4)
    source = {"type": "classifier", "model": {"path": str(judge), "compute_dtype": "float32"}}
    run = start(tiny_recipe(model, reward={"source": source}))
    assert run.wait(START_S) == 0, run.output
    steps = run.metrics()
    assert len(steps) == 2
    # A random head: no two texts get one logit, and none of them is told to be 0.
    assert all(record["reward/std"] > 0 for record in steps)
    assert all(
        record["reward/min"] < record["reward/mean"] < record["reward/max"] for record in steps
    )


# --- bad input, from the command line to the message ---------------------------------------


def refused(start, recipe, code):
    run = start(recipe)
    assert run.wait(START_S) == code, run.output
    text = " ".join((run.stderr + run.stdout).split())
    assert "Traceback" not in text
    return text


def test_an_unknown_key_is_refused_with_the_nearest_one(start, model):
    text = refused(start, tiny_recipe(model, actor__optimiser={"learning_rate": 1.0}), 2)
    assert "actor.optimiser" in text
    assert "did you mean" in text
    assert "optimizer" in text


def test_a_missing_model_folder_is_refused_before_anything_starts(start, model):
    text = refused(start, tiny_recipe(model, critic__model__path="/nowhere/model"), 2)
    assert "critic.model.path" in text
    assert "/nowhere/model" in text


def test_prompts_longer_than_the_limit_are_refused_at_the_start(start, model):
    recipe = tiny_recipe(model, actor__rollout={"type": "hf", "max_model_len": 8})
    text = refused(start, recipe, 2)
    assert "PROMPT_TOO_LONG" in text
    assert "rollout.max_model_len is 8" in text
    assert "data.max_prompt_tokens" in text
    assert "held-out score" not in text


def test_an_empty_data_set_is_refused(start, model, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    recipe = tiny_recipe(
        model,
        actor__data={"type": "jsonl", "path": str(empty)},
        run__evaluation={"num_prompts": 0},
    )
    text = refused(start, recipe, 2)
    assert "no training prompt" in text
    assert "actor" in text


def test_an_unreachable_store_is_named_with_a_remedy(start, model):
    # Port 1 is reserved and nobody listens there.
    recipe = tiny_recipe(model, store={"type": "redis", "url": "redis://127.0.0.1:1/0"})
    text = refused(start, recipe, 2)
    assert "redis://127.0.0.1:1/0" in text
    assert "store" in text


def test_a_reward_that_is_nan_fails_the_step_and_names_the_row(start, model, tmp_path):
    judge = write_tiny_classifier(tmp_path / "judge")
    (weights_file,) = judge.glob("*.safetensors")
    weights = load_file(weights_file)
    head = next(name for name in weights if name.startswith("score"))
    weights[head] = torch.full_like(weights[head], float("nan"))
    save_file(weights, weights_file, metadata={"format": "pt"})
    source = {"type": "classifier", "model": {"path": str(judge), "compute_dtype": "float32"}}
    text = refused(start, tiny_recipe(model, reward={"source": source}), 1)
    assert "REWARD_INVALID" in text
    assert "row 0" in text
    assert "reward rank 0" in text
