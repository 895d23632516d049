"""A real run whose processes are killed one after another, beside one that is left alone."""

import hashlib
import json
import signal

import psutil
import pytest
from support.commands import command_of
from support.mesh_runs import CliRun, tiny_model, tiny_recipe
from support.run_results import learnt, written

START_S = 240
STEPS = 12
VICTIMS = ("critic", "actor", "reward", "reference")


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
    run = CliRun(
        recipe_of(model),
        tmp_path_factory.mktemp("undisturbed"),
    )
    try:
        assert run.wait(START_S) == 0, run.output
        yield run.out
    finally:
        run.close()


def victim_of(run, name):
    if name != "valkey":
        return run.role_process(name)
    (found,) = [one for one in run.descendants() if "valkey-server" in " ".join(command_of(one))]
    return found


def makes_a_step(run):
    made = len(run.metrics())
    run.wait_until(lambda: len(run.metrics()) > made, START_S)


def recovers(run, number):
    run.wait_until(lambda: run.stdout.count("recovered in") == number, START_S)


def test_a_run_ends_with_the_same_bits_though_every_process_is_killed(model, undisturbed, tmp_path):
    run = CliRun(recipe_of(model), tmp_path)
    try:
        for number, name in enumerate(VICTIMS, start=1):
            makes_a_step(run)
            victim_of(run, name).send_signal(signal.SIGKILL)
            recovers(run, number)
        makes_a_step(run)
        victim_of(run, "valkey").send_signal(signal.SIGKILL)
        run.wait_until(lambda: "the embedded store" in run.stdout, START_S)
        makes_a_step(run)
        family = run.descendants()
        run.process.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=30)
        assert alive == []
    finally:
        before = run.metrics()
        run.kill()
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


def test_a_service_that_is_killed_while_it_starts_for_the_first_time_is_started_once_more(
    model, tmp_path
):
    run = CliRun(tiny_recipe(model, run__steps=1), tmp_path)

    def starting():
        return [one for one in run.descendants() if "rolemesh.services.critic" in command_of(one)]

    try:
        run.wait_until(starting, START_S)
        starting()[0].send_signal(signal.SIGKILL)
        assert run.wait(START_S) == 0, run.output
    finally:
        run.close()
    assert "critic is started once more: critic rank 0" in run.stdout
    assert json.loads((run.out / "summary.json").read_text())["recoveries"] == []


def hashes_of(folder):
    """Of what a run has learnt and saved; logs and the store tell of each try to go on."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {str(path.relative_to(folder)): path for path in files}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in names.items()
        if not name.startswith(("logs/", "store/"))
    }


# With fakes: test_damaged_checkpoints. Each file is held to its hash in numerics/test_checkpoint.
@pytest.mark.slow
def test_a_flipped_bit_in_the_only_checkpoint_ends_a_resume_that_changes_nothing(model, tmp_path):
    recipe = tiny_recipe(model, run__steps=100000, run__checkpoint={"every_steps": 0})
    run = CliRun(recipe, tmp_path)
    try:
        run.wait_until(lambda: len(run.metrics()) >= 2, START_S)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(60) == 130, run.output
    finally:
        # Its cuts go, as when the machine starts again.
        run.close()
    steps, (checkpoint,) = len(run.metrics()), (run.out / "checkpoints").iterdir()
    damaged = next(checkpoint.glob("actor/optimizer-exp_avg-*"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    before = hashes_of(run.out)
    recipe["run"]["steps"] = steps + 1

    def resumed():
        again = CliRun(recipe, tmp_path, "--resume", str(run.out))
        try:
            return again.wait(START_S)
        finally:
            again.close()

    assert resumed() == 1, run.output
    assert f"step {steps}: {damaged} does not match its SHA-256" in run.stderr
    assert f"--out {run.out} --from-start" in run.stderr
    assert hashes_of(run.out) == before
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert resumed() == 0, run.output
    assert [record["step"] for record in run.metrics()] == list(range(1, steps + 2))
