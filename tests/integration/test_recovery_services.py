"""A real run whose processes are killed one after another, beside one that is left alone."""

import json
import signal

import psutil
import pytest
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.run_results import learnt, written

START_S = 240
STEPS = 12
VICTIMS = ("critic", "actor", "reward", "reference", "valkey")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def recipe_of(model):
    return tiny_recipe(
        model,
        run__steps=STEPS,
        run__evaluation={"num_prompts": 4, "every_steps": 4},
        run__checkpoint={"every_steps": 5},
        # The machine is shared: a pause would only add to the test.
        run__recovery={"pause_s": 0.0},
    )


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    run = CliRun(recipe_of(model), tmp_path_factory.mktemp("undisturbed"))
    try:
        assert run.wait(START_S) == 0, run.output
        yield run.out
    finally:
        run.close()


def victim_of(run, name):
    if name != "valkey":
        return run.role_process(name)
    (found,) = [one for one in run.descendants() if "valkey-server" in " ".join(one.cmdline())]
    return found


def test_a_run_ends_with_the_same_bits_though_every_process_is_killed(model, undisturbed, tmp_path):
    run = CliRun(recipe_of(model), tmp_path)
    try:
        for number, name in enumerate(VICTIMS, start=1):
            made = len(run.metrics())
            run.wait_until(lambda: len(run.metrics()) > made, START_S)
            victim_of(run, name).send_signal(signal.SIGKILL)
            if name != "valkey":
                told = number
                run.wait_until(lambda: run.stdout.count("recovered in") == told, START_S)
        run.wait_until(lambda: "the embedded store" in run.stdout, START_S)
        made = len(run.metrics())
        run.wait_until(lambda: len(run.metrics()) > made, START_S)
        family = run.descendants()
        run.process.send_signal(signal.SIGKILL)
        run.process.wait(10)
        _, alive = psutil.wait_procs(family, timeout=30)
        assert alive == []
    finally:
        before = run.metrics()
        run._stdout.close()
        run._stderr.close()
    again = CliRun(recipe_of(model), tmp_path, "--resume", str(tmp_path / "run"))
    try:
        assert again.wait(START_S) == 0, again.output
    finally:
        again.close()
    assert learnt(run.out) == learnt(undisturbed)
    assert written(run.out) == written(undisturbed)
    assert 0 < len(before) < STEPS
    summary = json.loads((run.out / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("succeeded", STEPS)
