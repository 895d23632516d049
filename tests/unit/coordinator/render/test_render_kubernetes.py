"""`rolemesh render kubernetes`: what is made of a recipe, held to schemas and to compose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from support.compose_files import BASE_FILE, REPOSITORY
from typer.testing import CliRunner

from rolemesh.coordinator.commands.cli import app
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.render.memory import shared_memory_bytes
from rolemesh.coordinator.render.pods import STORE_COMMAND
from rolemesh.services.runtime.server.config import ServiceConfig, load_config

PPO = "recipes/quickstart-ppo.yaml"
IMAGES = (
    "--image=registry.example/rolemesh:gpu",
    "--coordinator-image=registry.example/rolemesh:coordinator",
)

Document = dict[str, Any]
SCALED = (
    "--gpu",
    "--set=certificates=/mesh/identity",
    "--set=services.reward={registers: true, most_replicas: 3}",
    "--set=schedule.sampler={type: sync, batch_size: 4}",
    "--set=pools={reward: {roles: [reward]}, actor: {roles: [actor, critic, reference]}}",
)
"""A reward whose set may be scaled to three pods."""


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def render(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["render", "kubernetes", *arguments, *IMAGES])


def rendered(*arguments: str) -> dict[str, Document]:
    """Documents by kind and name, e.g. "Job/rolemesh-coordinator"."""
    result = render(*arguments)
    assert result.exit_code == 0, result.output
    documents = list(yaml.safe_load_all(result.stdout))
    found = {f"{one['kind']}/{one['metadata']['name']}": one for one in documents}
    assert len(found) == len(documents)
    return found


def pods(documents: dict[str, Document]) -> Iterator[tuple[str, Document]]:
    for name, document in documents.items():
        if document["kind"] in ("StatefulSet", "Job"):
            yield name, document["spec"]["template"]


def container(documents: dict[str, Document], name: str) -> Document:
    (found,) = documents[name]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def environment(documents: dict[str, Document], name: str) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container(documents, name)["env"]}


def settings(documents: dict[str, Document], role: str) -> ServiceConfig:
    return load_config(role, [], environment(documents, f"StatefulSet/rolemesh-{role}"))


def trained(documents: dict[str, Document]) -> Recipe:
    """The recipe that the coordinator reads."""
    command, restartable, file, *flags = container(documents, "Job/rolemesh-coordinator")["args"]
    assert (command, restartable) == ("train", "--restartable")
    assert file.startswith("/mesh/recipe/")
    assert Path(file).name in documents["ConfigMap/rolemesh-recipe"]["data"]
    found = environment(documents, "Job/rolemesh-coordinator")
    return load_recipe(
        [Path("recipes") / Path(file).name], overrides=flags[1::2], environment=found
    )


@pytest.mark.parametrize(
    "arguments",
    [
        (PPO,),
        (PPO, "--gpu", "--namespace", "team-a", "--name", "mine"),
        ("recipes/safe-rlhf.yaml", "--gpu"),
        ("recipes/reward-model.yaml", "--gpu"),
        (PPO, *SCALED),
    ],
    ids=lambda words: " ".join(words)[8:40],
)
def test_manifests_obey_the_schemas_of_kubernetes(arguments: tuple[str, ...]) -> None:
    # Importing it takes 1.5 s, which not every process that collects tests has to pay.
    import kubernetes_validate

    for document in rendered(*arguments).values():
        kubernetes_validate.validate(document, "1.33", strict=True)


def test_the_file_of_the_repository_is_what_the_command_writes(tmp_path: Path) -> None:
    out = tmp_path / "mesh.yaml"
    assert render(PPO, "--gpu", "--out", str(out)).exit_code == 0
    assert out.read_text() == (REPOSITORY / "deploy" / "kubernetes.quickstart.yaml").read_text()


def test_each_role_is_a_set_that_the_coordinator_finds() -> None:
    documents = rendered(PPO, "--gpu", "--set", "actor.train.dp=2")
    means = trained(documents)
    for role in means.roles:
        found = settings(documents, role)
        address = means.address(role)
        assert address == f"rolemesh-{role}-0.rolemesh-{role}:50051"
        assert found.advertise == f"$(POD_NAME).rolemesh-{role}:50051"
        assert found.layout.layout() == means.layout(role)
        # Encrypted, to members alone.
        assert found.identity is not None
        assert not found.allow_remote
        document = documents[f"StatefulSet/rolemesh-{role}"]
        service = documents[f"Service/{document['spec']['serviceName']}"]["spec"]
        labels = document["spec"]["template"]["metadata"]["labels"]
        assert service["selector"].items() <= labels.items()
        assert service["clusterIP"] == "None"
        grace = document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert found.drain_timeout_s < grace
    limits = {
        role: container(documents, f"StatefulSet/rolemesh-{role}").get("resources")
        for role in means.roles
    }
    assert limits == {
        "actor": {"limits": {"nvidia.com/gpu": 2}},
        "critic": {"limits": {"nvidia.com/gpu": 1}},
        "reference": {"limits": {"nvidia.com/gpu": 1}},
        "reward": None,
    }
    # No two roles take turns, since a pod's GPUs are its own.
    assert not any(means.sleeps(role) for role in means.roles)


def test_no_pod_has_a_right_that_it_does_not_need() -> None:
    documents = rendered("recipes/safe-rlhf.yaml", "--gpu")
    users = {}
    for name, pod in pods(documents):
        spec = pod["spec"]
        users[name.rpartition("-")[2]] = spec["securityContext"]["runAsUser"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        volumes = {volume["name"] for volume in spec["volumes"]} | {"data"}
        assert not any("hostPath" in volume for volume in spec["volumes"])
        for one in [*spec["containers"], *spec.get("initContainers", [])]:
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {mount["name"] for mount in one["volumeMounts"]} <= volumes
    # As in docker-compose.yml: judges are users of their own, and write no run.
    assert users["actor"] == users["coordinator"] == 10001
    assert (users["reward"], users["cost"]) == (10002, 10003)
    writes = {
        name.rpartition("-")[2]
        for name, pod in pods(documents)
        for mount in pod["spec"]["containers"][0]["volumeMounts"]
        if mount["mountPath"] == "/mesh/runs" and not mount.get("readOnly")
    }
    assert {"actor", "critic", "coordinator"} <= writes
    assert not {"reward", "cost", "reference"} & writes


def test_a_reward_that_is_trained_may_save() -> None:
    documents = rendered("recipes/reward-model.yaml")
    name = "StatefulSet/rolemesh-reward"
    pod = documents[name]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == 10001
    mounts = container(documents, name)["volumeMounts"]
    (runs,) = [one for one in mounts if one["mountPath"] == "/mesh/runs"]
    assert "readOnly" not in runs
    assert settings(documents, "reward").shared_memory


def test_shared_memory_is_what_compose_gives() -> None:
    documents = rendered(PPO, "--gpu")

    def size(role: str) -> str:
        pod = documents[f"StatefulSet/rolemesh-{role}"]["spec"]["template"]["spec"]
        (shm,) = [one for one in pod["volumes"] if one["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory"
        return str(shm["emptyDir"]["sizeLimit"])

    assert size("actor") == f"{shared_memory_bytes(trained(documents)) >> 20}Mi"
    assert size("reward") == "1024Mi"


def test_traffic_is_denied_but_between_members_and_from_coordinator_to_store() -> None:
    documents = rendered(PPO)
    policies = {
        name.removeprefix("NetworkPolicy/rolemesh-"): one["spec"]
        for name, one in documents.items()
        if one["kind"] == "NetworkPolicy"
    }

    def selects(selector: Document, labels: dict[str, str]) -> bool:
        keys = [one["key"] for one in selector.get("matchExpressions", [])]
        return selector["matchLabels"].items() <= labels.items() and set(keys) <= set(labels)

    labels = {name.rpartition("-")[2]: pod["metadata"]["labels"] for name, pod in pods(documents)}

    def may_reach(source: str, target: str) -> bool:
        """Whether one pod may send to another one; both sides have to allow it."""
        ways = []
        for own, other, direction, peers in (
            (source, target, "egress", "to"),
            (target, source, "ingress", "from"),
        ):
            applying = [
                one
                for one in policies.values()
                if direction.capitalize() in one["policyTypes"]
                and selects(one["podSelector"], labels[own])
            ]
            assert applying, f"{own} is open: no policy denies its {direction}"
            ways.append(
                any(
                    selects(peer["podSelector"], labels[other])
                    for one in applying
                    for rule in one[direction]
                    for peer in rule[peers]
                    if "podSelector" in peer
                )
            )
        return all(ways)

    members = ("coordinator", "actor", "critic", "reference", "reward")
    reached = {(a, b) for a in labels for b in labels if a != b and may_reach(a, b)}
    expected = {(a, b) for a in members for b in members if a != b}
    assert reached == expected | {("coordinator", "store")}
    # Nothing beyond the mesh but names.
    outside = [
        rule
        for one in policies.values()
        for rule in one.get("egress", [])
        if not all("podSelector" in peer for peer in rule["to"])
    ]
    assert [{port["port"] for port in rule["ports"]} for rule in outside] == [{53}]


def test_secrets_come_by_reference_and_the_file_says_how_to_make_each() -> None:
    source = "{type: python, function: 'mine.rewards:judge', environment: [JUDGE], network: true}"
    result = render(PPO, "--set", f"reward.source={source}")
    documents = rendered(PPO, "--set", f"reward.source={source}")
    assert not any(document["kind"] == "Secret" for document in documents.values())
    head = "\n".join(line for line in result.stdout.splitlines() if line.startswith("#"))
    named = {
        volume["secret"]["secretName"]
        for _, pod in pods(documents)
        for volume in pod["spec"]["volumes"]
        if "secret" in volume
    }
    made = set(re.findall(r"generic rolemesh-(\w+)", head))
    made |= set(re.search(r"for role in ([\w ]+);", head)[1].split())  # type: ignore[index]
    assert named == {f"rolemesh-{one}" for one in made}
    (variable,) = [
        one
        for one in container(documents, "StatefulSet/rolemesh-reward")["env"]
        if one["name"] == "JUDGE"
    ]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "rolemesh-variables", "key": "JUDGE"}
    assert settings(documents, "reward").function_network


def test_probes_and_store_are_those_of_compose() -> None:
    compose = yaml.safe_load(BASE_FILE.read_text())
    documents = rendered(PPO)
    actor = container(documents, "StatefulSet/rolemesh-actor")
    command = compose["services"]["actor"]["healthcheck"]["test"]
    assert ["CMD", *actor["readinessProbe"]["exec"]["command"]] == command
    assert actor["livenessProbe"]["exec"]["command"] == [*command[1:], "liveness"]
    (text,) = compose["services"]["store"]["command"]
    given = text.replace("$$", "$").replace(
        "/run/secrets/rolemesh_store_password", "/given/password"
    )
    assert given == STORE_COMMAND
    budget = documents["PodDisruptionBudget/rolemesh-roles"]["spec"]
    chosen = {
        name.rpartition("-")[2]
        for name, pod in pods(documents)
        if budget["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    }
    assert chosen == {"actor", "critic", "reference", "reward"}


def test_a_role_on_several_pods_is_a_group_that_meets_at_its_first_pod() -> None:
    layout = ("--set", "actor.train={tp: 2, dp: 2}")
    documents = rendered(PPO, "--gpu", *layout, "--hosts", "actor=2")
    assert "StatefulSet/rolemesh-actor" not in documents
    spec = documents["LeaderWorkerSet/rolemesh-actor"]["spec"]
    group = spec["leaderWorkerTemplate"]
    assert (spec["replicas"], group["size"]) == (1, 2)
    # The first pod is ready once the others have come, and one that ends takes all with it.
    assert spec["startupPolicy"] == "LeaderCreated"
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    first, follower = (
        group[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate")
    )
    assert first["resources"] == follower["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    names = [one["name"] for one in first["env"]]
    values = {one["name"]: one.get("value") for one in first["env"]}
    assert values["ROLEMESH_SERVICE__HOSTS"] == "2"
    assert values["ROLEMESH_SERVICE__HOST_RANK"] == "$(LWS_WORKER_INDEX)"
    assert values["ROLEMESH_SERVICE__MEET"] == "$(LWS_LEADER_ADDRESS):29400"
    assert values["ROLEMESH_SERVICE__HOST"] == "$(POD_IP)"
    # Kubernetes fills in what stands before.
    assert names.index("POD_IP") < names.index("ROLEMESH_SERVICE__HOST")
    assert "ROLEMESH_SERVICE__ADVERTISE" not in values
    # A follower's ranks are asked by the first pod alone.
    assert "$POD_IP:50051" in first["livenessProbe"]["exec"]["command"][2]
    assert not [name for name in follower if name.endswith("Probe")]
    assert group["leaderTemplate"]["metadata"] == group["workerTemplate"]["metadata"]
    assert trained(documents).address("actor") == "rolemesh-actor-0.rolemesh-actor:50051"
    selected = documents["Service/rolemesh-actor"]["spec"]["selector"]
    assert selected.items() <= group["leaderTemplate"]["metadata"]["labels"].items()


def test_rollout_services_are_replicas_of_one_set() -> None:
    replicas = "services.rollout.replicas=2"
    model = "rollout.model.path=.models/SmolLM2-135M-Instruct"
    if not (REPOSITORY / ".models" / "SmolLM2-135M-Instruct").is_dir():
        pytest.skip("needs the quickstart's model: make model")
    documents = rendered("recipes/async-grpo.yaml", "--set", replicas, "--set", model)
    assert documents["StatefulSet/rolemesh-rollout"]["spec"]["replicas"] == 2
    assert trained(documents).service("rollout").addresses == (
        "rolemesh-rollout-0.rolemesh-rollout:50051",
        "rolemesh-rollout-1.rolemesh-rollout:50051",
    )


def test_services_that_join_and_leave_register_and_their_set_may_be_scaled() -> None:
    documents = rendered(PPO, *SCALED)
    reward = documents["StatefulSet/rolemesh-reward"]["spec"]
    assert reward["replicas"] == 1
    found = environment(documents, "StatefulSet/rolemesh-reward")
    assert found["ROLEMESH_SERVICE__REGISTER_AT"] == "rolemesh-coordinator:29300"
    assert found["ROLEMESH_SERVICE__NUMBER"] == "$(POD_INDEX)"
    # Kubernetes replaces names of variables that stand before.
    assert [*found].index("POD_INDEX") < [*found].index("ROLEMESH_SERVICE__NUMBER")
    (index,) = [
        one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in reward["template"]["spec"]["containers"][0]["env"]
        if one["name"] == "POD_INDEX"
    ]
    assert index == "metadata.labels['apps.kubernetes.io/pod-index']"
    numbered = {**found, "ROLEMESH_SERVICE__NUMBER": "2"}
    assert load_config("reward", [], numbered).number == 2

    job = documents["Job/rolemesh-coordinator"]["spec"]["template"]
    named = documents["Service/rolemesh-coordinator"]["spec"]
    assert named["selector"].items() <= job["metadata"]["labels"].items()
    means = trained(documents)
    assert (means.api.host, means.api.member_port) == ("0.0.0.0", 29300)
    assert means.service("reward").registers
    assert means.service("reward").most_replicas == 3
    # The others are where their sets are, and nothing listens without need.
    assert means.address("actor") == "rolemesh-actor-0.rolemesh-actor:50051"
    assert "ROLEMESH_SERVICE__REGISTER_AT" not in environment(
        documents, "StatefulSet/rolemesh-actor"
    )
    assert "Service/rolemesh-coordinator" not in rendered(PPO)
    assert trained(rendered(PPO)).api.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "Mine"], "--name is 'Mine'"),
        (["--namespace", "a b"], "--namespace is 'a b'"),
        (["--claim", "-x"], "--claim is '-x'"),
        (["--store-image", "a b"], "--store-image is 'a b'"),
        (["--set", "services.actor.address=far:50051"], "services.actor has an address"),
        (
            [
                "--set",
                "pools={a: {devices: ['cuda:0'], roles: [actor, critic]}, b: {roles: "
                "[reference, reward]}}",
            ],
            "pools.a has actor, critic, which take turns on its GPUs",
        ),
        (["--hosts", "judge=2"], "one of actor, critic, reference, reward"),
        (["--hosts", "actor=1"], "give a number of pods from 2"),
        (["--hosts", "actor=2"], "1 ranks with tp 1"),
        (["--hosts", "actor=2", "--set", "actor.train.tp=2"], "2 ranks with tp 2"),
        (["--gpu", "--set", "pools.laptop.devices=['cuda:0']"], "name GPUs already"),
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
