"""`rolemesh render slurm`: what the job asks for, and its shell, on stand-ins of Slurm."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result
from support.compose_files import REPOSITORY
from support.slurm_fakes import FakeSlurm
from typer.testing import CliRunner

from rolemesh.coordinator.commands.cli import app

PPO = "recipes/quickstart-ppo.yaml"
TWO_NODES = ("--gpus", "8", "--on", "critic=1", "--on", "reference=1")

Start = Callable[..., FakeSlurm]


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def render(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["render", "slurm", *arguments])


def rendered(*arguments: str) -> str:
    result = render(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def requests(script: str) -> set[str]:
    lines = script.splitlines()
    return {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Start]:
    """Starts the script of some arguments on stand-ins."""
    made: list[FakeSlurm] = []

    def start(
        *arguments: str, code: int = 0, restarts: int = 0, files: tuple[str, ...] = ()
    ) -> FakeSlurm:
        fake = FakeSlurm(tmp_path, rendered(PPO, *arguments))
        made.append(fake)
        for name in files:
            fake.touch(name)
        variables = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        fake.start(code=code, variables=variables)
        return fake

    yield start
    for fake in made:
        fake.close()


def is_queued_again(fake: FakeSlurm) -> bool:
    return "scontrol requeue 7" in fake.calls


# --- what it asks for -----------------------------------------------------------------------


def test_a_recipe_on_one_node_asks_for_it_whole_and_for_the_gpus_of_its_pools() -> None:
    asked = requests(rendered(PPO, "--gpus", "4", "--time", "2-12", "--partition", "a,b"))
    assert asked >= {
        "--nodes=1",
        "--exclusive",
        "--mem=0",
        "--gpus-per-node=4",
        "--requeue",
        "--time=2-12",
        "--partition=a,b",
        "--signal=B:USR1@300",
    }
    assert not any(one.startswith("--account") for one in asked)
    assert not any(one.startswith("--gpus") for one in requests(rendered(PPO)))


def test_each_node_has_the_roles_that_are_put_there_on_all_of_its_gpus() -> None:
    script = rendered(PPO, *TWO_NODES)
    assert "--nodes=2" in requests(script)
    served = {
        words[1]: (words[2], words[4], words[words.index("--layout") + 1])
        for words in (line.split() for line in script.splitlines() if line.startswith("serve "))
    }
    sizes = {role: layout.split(",")[2] for role, (_, _, layout) in served.items()}
    assert {role: (node, gpus) for role, (node, gpus, _) in served.items()} == {
        "actor": ("0", "1,2,3,4,5,6,7,8"),
        "critic": ("1", "1,2,3,4"),
        "reference": ("1", "5,6,7,8"),
        "reward": ("0", "none"),
    }
    assert sizes == {"actor": "dp=8", "critic": "dp=4", "reference": "dp=4", "reward": "dp=1"}


def test_the_file_of_the_repository_is_what_the_command_writes(tmp_path: Path) -> None:
    out = tmp_path / "job.sh"
    assert render(PPO, *TWO_NODES, "--out", str(out)).exit_code == 0
    assert out.read_text() == (REPOSITORY / "deploy" / "slurm.two-nodes.sh").read_text()


def test_no_argument_leaves_the_comment_at_the_top() -> None:
    script = rendered(PPO, "--set", "run.name=tiny\n", "--setup", "module load cuda")
    head, _, _ = script.partition("#SBATCH")
    assert all(line.startswith("#") for line in head.splitlines())
    assert "\nmodule load cuda\n" in script


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--on", "critic=2"], "leaves node 1 without a role"),
        (["--on", "judge=1"], "one of actor, critic, reference, reward"),
        (["--on", "critic=1", "--on", "critic=0"], "give each role of the recipe once"),
        (["--on", "critic"], "give a node, counted from 0"),
        (["--on", "critic=one"], "give a node, counted from 0"),
        (["--on", "critic=0,1"], "its layout has 1 ranks with tp 1"),
        (["--on", "critic=1,0"], "give nodes that follow each other"),
        (["--on", "actor=0,1", "--set", "actor.train={tp: 2, dp: 1}"], "2 ranks with tp 2"),
        (
            ["--on", "actor=0,1", "--on", "critic=1", "--gpus", "2"],
            "has their GPUs for itself",
        ),
        (["--interface", "a b"], "--interface is 'a b'"),
        (
            ["--on", "critic=1", "--set", "services.actor.address=far:50051"],
            "services.actor has an address",
        ),
        (
            [
                *("--on", "critic=1", "--set"),
                "pools={a: {devices: ['cuda:0'], roles: [actor, critic, reference, reward]}}",
            ],
            "take turns on its GPUs",
        ),
        (["--time", "soon"], "--time is 'soon'"),
        (["--time", "5"], "longer than the notice"),
        (["--partition", "a b"], "--partition is 'a b'"),
        (["--account", "x\n#SBATCH --nodes=9"], "--account is"),
        (["--setup", "a\nb"], "one line of a shell"),
        (["--gpus", "2", "--set", "actor.train.tp=4"], "--gpus is 2, but the recipe's layouts"),
        (["--gpus", "2", "--set", "pools.laptop.devices=['cuda:0']"], "name GPUs already"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:40],
)
def test_bad_input_is_refused_with_field_value_and_remedy(
    arguments: list[str], message: str
) -> None:
    result = render(PPO, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


# --- what its shell does --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "restarts", "makes_steps", "is_again"),
    [
        (0, 0, False, False),
        (1, 0, True, False),  # The run has failed for good.
        (2, 0, False, False),
        (130, 0, True, False),  # A user has ended it.
        (137, 0, False, True),
        (143, 0, True, True),
        (137, 3, True, True),
        (137, 1, False, False),  # It would be queued without end.
    ],
)
def test_only_a_killed_coordinator_is_queued_again(
    job: Start, code: int, restarts: int, makes_steps: bool, is_again: bool, tmp_path: Path
) -> None:
    if makes_steps:
        (tmp_path / "steps").write_text("{}\n")
    fake = job(code=code, restarts=restarts, files=("end",))
    status, output = fake.wait()
    assert is_queued_again(fake) == is_again
    if not is_again:
        assert status == (1 if code == 137 else code), output
    assert ("no step was made" in output) == (code == 137 and not is_again)


@pytest.mark.parametrize("is_early", [False, True], ids=["in-a-step", "before-it-runs"])
@pytest.mark.parametrize(
    ("number", "is_again"), [(signal.SIGUSR1, True), (signal.SIGINT, False)], ids=["near", "asked"]
)
def test_a_run_that_is_told_to_end_saves_and_only_a_limit_queues_it_again(
    job: Start, number: signal.Signals, is_again: bool, is_early: bool
) -> None:
    fake = job("--on", "critic=1", code=130)
    early = "certs init" if is_early else "train "
    fake.wait_until(lambda: any(one.startswith(early) for one in fake.calls))
    assert fake.process is not None
    if not is_early:
        fake.wait_until(lambda: fake.has("trains"))
    fake.process.send_signal(number)
    _, output = fake.wait()
    if not is_early:
        # The coordinator alone: Slurm's own signals would end the services of its step.
        assert fake.calls.count("told to end") == 1, output
    assert is_queued_again(fake) == is_again, output


def test_a_cancelled_job_is_not_queued_again(job: Start) -> None:
    fake = job(code=137)
    fake.wait_until(lambda: fake.has("trains"))
    assert fake.process is not None
    fake.process.send_signal(signal.SIGTERM)
    fake.touch("end")
    status, _ = fake.wait()
    assert status == 137
    assert not is_queued_again(fake)


def test_the_status_is_the_coordinators_also_where_the_shell_does_not_know_it(job: Start) -> None:
    # As bash does where a signal comes at the moment at which a process ends (5.2, seen in 2 %).
    fake = job("--setup", 'wait() { builtin wait "$@"; return 255; }', code=130, files=("end",))
    status, output = fake.wait()
    assert status == 130, output
    assert not is_queued_again(fake)


def test_a_coordinator_whose_status_was_never_written_counts_as_killed(job: Start) -> None:
    # Of memory, say: the shell that would write it goes with the step.
    fake = job("--setup", 'srun() { command srun "$@"; kill -9 "$BASHPID"; }', files=("end",))
    fake.wait()
    assert is_queued_again(fake)


def test_services_on_nodes_get_their_gpus_and_the_coordinator_their_addresses(job: Start) -> None:
    fake = job(*TWO_NODES)
    fake.wait_until(lambda: fake.has("trains"))
    served = {one.split()[1]: one.split()[2] for one in fake.calls if one.startswith("serve ")}
    # Of the job's GPUs, which are 8 to 15 of the node, those at the places of the pools.
    assert served == {
        "actor": "gpus=8,9,10,11,12,13,14,15",
        "critic": "gpus=8,9,10,11",
        "reference": "gpus=12,13,14,15",
        "reward": "gpus=",
    }
    addresses = dict(
        line.split("=") for line in (fake.folder / "addresses").read_text().splitlines()
    )
    assert set(addresses) == {
        f"ROLEMESH_SERVICES__{role}__ADDRESS" for role in ("ACTOR", "CRITIC", "REFERENCE", "REWARD")
    }
    assert addresses["ROLEMESH_SERVICES__CRITIC__ADDRESS"].startswith("critic-host:4")
    # Nothing else can become a member of the mesh.
    certificates = fake.folder / "runs" / "quickstart-ppo-7.mesh" / "certs"
    assert certificates.is_dir()
    assert not (certificates / "authority.pem").exists()
    # GPUs that the coordinator saw would go to pools that name none.
    (train,) = [one for one in fake.calls if one.startswith("train")]
    assert train.startswith("train gpus= train --restartable")
    nodes = {one.split("--job-name=")[1].split()[0]: one for one in fake.calls if "srun" in one}
    assert {name for name, call in nodes.items() if "--relative=1 " in call} == {
        "critic",
        "reference",
    }
    fake.touch("end")
    status, output = fake.wait()
    assert status == 0, output
    # Keys of a mesh that is over, and of its authority.
    assert not (fake.folder / "runs" / "quickstart-ppo-7.mesh").exists()


def test_a_service_that_dies_is_started_again_where_it_was(job: Start) -> None:
    fake = job("--on", "critic=1")
    fake.wait_until(lambda: fake.has("trains"))
    fake.touch("critic.dies")

    def starts() -> list[str]:
        return [one for one in fake.calls if one.startswith("serve critic")]

    fake.wait_until(lambda: len(starts()) == 2)
    address = next(
        line for line in (fake.folder / "addresses").read_text().splitlines() if "CRITIC" in line
    )
    ports = [one.partition("port=")[2].split()[0] for one in starts()]
    assert ports == ["0", address.rpartition(":")[2]]


def test_a_service_that_never_starts_ends_the_job(job: Start) -> None:
    fake = job("--on", "critic=1", files=("critic.broken",))
    status, output = fake.wait()
    assert status == 1
    assert "critic does not start" in output
    assert not is_queued_again(fake)


def test_a_role_over_several_nodes_meets_at_the_first_one(job: Start) -> None:
    fake = job("--gpus", "4", "--on", "actor=0,1", "--on", "critic=2", "--on", "reference=2")
    fake.wait_until(lambda: fake.has("trains"))

    def served() -> list[str]:
        return sorted(one for one in fake.calls if one.startswith("serve actor"))

    # The coordinator waits for the first one alone.
    fake.wait_until(lambda: len(served()) == 2)
    settings = [dict(word.split("=", 1) for word in one.split() if "=" in word) for one in served()]
    assert [one["--host-rank"] for one in settings] == ["0", "1"]
    assert [one.count("--host=") for one in served()] == [1, 1]
    assert {one["--hosts"] for one in settings} == {"2"}
    (meet,) = {one["--meet"] for one in settings}
    host, _, port = meet.rpartition(":")
    assert (host, 20000 <= int(port) < 32000) == (settings[0]["--host"], True)
    # All of both nodes: eight ranks, four on each.
    assert {one["gpus"] for one in settings} == {"8,9,10,11"}
    script = (fake.folder / "job.sh").read_text()
    assert "dp=8" in next(line for line in script.splitlines() if line.startswith("serve actor"))
    assert {"--nodes=3", "--gpus-per-node=4"} <= requests(script)
    (critic,) = [one for one in fake.calls if one.startswith("serve critic")]
    assert "--host=0.0.0.0" in critic
    assert "--hosts" not in critic


def test_rollout_services_may_be_on_nodes_of_their_own(tmp_path: Path) -> None:
    recipe = ["recipes/async-grpo.yaml", "--set", "services.rollout.replicas=2"]
    pools = "pools={a: {roles: [actor, reference, reward]}, b: {devices: ['cuda:0', 'cuda:1'], "
    pools += "roles: [rollout]}}"
    script = rendered(*recipe, "--on", "rollout=1,2", "--set", pools)
    served = [line.split()[1:5] for line in script.splitlines() if line.startswith("serve ")]
    # Each on a node, and on a GPU of its own of the pool, so that one node would do as well.
    assert ["rollout-0", "1", "1", "1"] in served
    assert ["rollout-1", "2", "1", "2"] in served
    assert "--set services.rollout.replicas=1" in script
    addresses = [line for line in script.splitlines() if "ROLLOUT__ADDRESSES=" in line]
    assert addresses == [
        'export ROLEMESH_SERVICES__ROLLOUT__ADDRESSES="[\'$(<"$mesh/rollout-0.address")\', '
        '\'$(<"$mesh/rollout-1.address")\']"'
    ]
