"""Manifests of Kubernetes: one recipe as a Job, and a StatefulSet for each of its roles.

What a mesh of docker-compose.yml is on one host, these are on the nodes of a cluster. Each pod has
shared memory of its own, so rows travel by the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from rolemesh.coordinator.recipe.model_sizes import trained_models
from rolemesh.coordinator.recipe.role_names import kind_of
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.service_flags import named_variables
from rolemesh.coordinator.render.compose import PlainDumper, granted_settings
from rolemesh.coordinator.render.kubernetes_job import (
    MEMBER_PORT,
    SERVICE_PORT,
    coordinator_manifests,
)
from rolemesh.coordinator.render.kubernetes_options import KubernetesOptions, check_options
from rolemesh.coordinator.render.memory import experience_bytes, shared_memory_bytes
from rolemesh.coordinator.render.placement import device_ids
from rolemesh.coordinator.render.pods import (
    CONFINED,
    ROLE_USERS,
    Volumes,
    headless_service,
    identity_container,
    labels_of,
    network_policies,
    pod_security,
    selected_by,
    store_manifests,
)

_METRICS_PORT = 9100
_MEETING_PORT = 29400
_HEALTH_CHECK = ["python", "/mesh/deploy/health_check.py"]

_ANSWERS_BYTES = 1 << 30
"""Shared memory of reward and cost: the default of docker-compose.yml."""

_JUDGES = ("reward", "cost")


class _Dumper(PlainDumper):
    """The same, with texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def kubernetes_manifests(
    recipe: Recipe,
    files: Mapping[str, str],
    settings: Sequence[str],
    options: KubernetesOptions,
    header: str,
) -> str:
    """Returns the text of all manifests.

    Args:
        recipe: The recipe, with its pools on GPUs or on the CPU.
        files: Texts of the recipe's files by name, a later one wins.
        settings: Texts of `--set` for the coordinator.
        options: Of the mesh.
        header: Comment at the top, without "# ".

    Raises:
        RecipeError: An option is no name, a role has an address, or roles share GPUs.
    """
    check_options(recipe, options)
    documents = [_config_map(files, options)]
    documents += network_policies(options.name)
    documents += store_manifests(options.name, options.store_image)
    for role in recipe.roles:
        documents.append(headless_service(options.name, role, {"grpc": SERVICE_PORT}))
        documents.append(_role(recipe, role, options))
    documents.append(_disruption_budget(options))
    documents += coordinator_manifests(recipe, list(files), settings, options)
    for document in documents:
        if options.namespace is not None:
            document["metadata"]["namespace"] = options.namespace
    head = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    bodies = [yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=100) for one in documents]
    return head + "".join(f"---\n{body}" for body in bodies)


def _config_map(files: Mapping[str, str], options: KubernetesOptions) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{options.name}-recipe",
            "labels": labels_of(options.name, "coordinator"),
        },
        "data": dict(files),
    }


def _role(recipe: Recipe, role: str, options: KubernetesOptions) -> dict[str, Any]:
    # A reward that is trained is one of the trained roles, as in docker-compose.yml.
    is_trained = role in trained_models(recipe)
    is_judge = role in _JUDGES and not is_trained
    services = recipe.services_of(role)
    num_pods = options.hosts.get(role, 1)
    num_gpus = max(len(device_ids(recipe, service)) for service in services) // num_pods
    volumes = Volumes(options.name, options.claim)
    kind = kind_of(role)
    identity = identity_container(volumes, kind, [f"{kind}.pem"], options.image)
    volumes.add_memory("shm", _ANSWERS_BYTES if is_judge else shared_memory_bytes(recipe))
    volumes.add_disk("tmp", 2 << 30)
    environment = {
        "ROLEMESH_SERVICE__HOST": "0.0.0.0",
        "ROLEMESH_SERVICE__PORT": str(SERVICE_PORT),
        "ROLEMESH_SERVICE__METRICS_PORT": str(_METRICS_PORT),
        "ROLEMESH_SERVICE__ADVERTISE": f"$(POD_NAME).{options.name}-{role}:{SERVICE_PORT}",
        "ROLEMESH_SERVICE__IDENTITY": f"/mesh/identity/{kind}.pem",
        "ROLEMESH_SERVICE__LAYOUT": recipe.layout(role).flag(),
        "ROLEMESH_SERVICE__EXPERIENCE_CAPACITY_BYTES": str(experience_bytes(recipe)),
        "ROLEMESH_SERVICE__SHARED_MEMORY": "false" if is_judge else "true",
        "ROLEMESH_SERVICE__FOLDERS": "/mesh/.models,/mesh/recipes,/mesh/runs",
        "ROLEMESH_SERVICE__CODE_ROOTS": "/mesh/recipes",
        "ROLEMESH_SERVICE__DRAIN_TIMEOUT_S": "120",
        **granted_settings(recipe, role),
    }
    if num_pods > 1:
        # Each pod is called at an address of its own. LeaderWorkerSet sets its variables first.
        del environment["ROLEMESH_SERVICE__ADVERTISE"]
        environment |= {
            "ROLEMESH_SERVICE__HOST": "$(POD_IP)",
            "ROLEMESH_SERVICE__HOSTS": str(num_pods),
            "ROLEMESH_SERVICE__HOST_RANK": "$(LWS_WORKER_INDEX)",
            "ROLEMESH_SERVICE__MEET": f"$(LWS_LEADER_ADDRESS):{_MEETING_PORT}",
        }
    if num_gpus:
        environment |= {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility", "NCCL_DEBUG": "WARN"}
    # Before those that name them.
    facts = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
    if recipe.service(role).registers:
        at = f"{options.name}-coordinator:{MEMBER_PORT}"
        environment["ROLEMESH_SERVICE__REGISTER_AT"] = at
        if num_pods == 1:
            facts["POD_INDEX"] = "metadata.labels['apps.kubernetes.io/pod-index']"
            environment["ROLEMESH_SERVICE__NUMBER"] = "$(POD_INDEX)"
    pod_facts = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in facts.items()
    ]
    container: dict[str, Any] = {
        "name": role,
        "image": options.image,
        "args": ["serve", kind],
        "env": [
            *pod_facts,
            *({"name": name, "value": value} for name, value in environment.items()),
            *_variables(recipe, role, options),
        ],
        "ports": [
            {"name": "grpc", "containerPort": SERVICE_PORT},
            {"name": "metrics", "containerPort": _METRICS_PORT},
        ],
        "securityContext": CONFINED,
        "volumeMounts": [
            {"name": "identity", "mountPath": "/mesh/identity", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
            *volumes.folders(writes_runs=is_trained),
        ],
    }
    if num_gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": num_gpus}}
    user = ROLE_USERS["actor" if is_trained else kind]
    template = {
        "metadata": {"labels": {**labels_of(options.name, role), "rolemesh/member": "role"}},
        "spec": {
            **pod_security(user),
            # Longer than the drain.
            "terminationGracePeriodSeconds": 130,
            "affinity": _near_each_other(options),
            "initContainers": [identity],
            "containers": [{**container, **_probes(is_one_pod=num_pods == 1)}],
            "volumes": volumes.listed,
        },
    }
    metadata = {"name": f"{options.name}-{role}", "labels": labels_of(options.name, role)}
    if num_pods > 1:
        followers = {**template, "spec": {**template["spec"], "containers": [container]}}
        return _leader_worker_set(metadata, num_pods, template, followers)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "serviceName": f"{options.name}-{role}",
            # Of services that join and leave, the least; more are scaled up to.
            "replicas": recipe.service(role).replicas,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels_of(options.name, role)},
            "template": template,
        },
    }


def _leader_worker_set(
    metadata: dict[str, Any], size: int, first: dict[str, Any], followers: dict[str, Any]
) -> dict[str, Any]:
    """A service on several pods, which start and end together (leaderworkerset.sigs.k8s.io)."""
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            # The first pod is ready only once it has met the others.
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": size,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": first,
                "workerTemplate": followers,
            },
        },
    }


def _variables(recipe: Recipe, role: str, options: KubernetesOptions) -> list[dict[str, Any]]:
    """Variables that the recipe names for a role, from a Secret."""
    return [
        {
            "name": name,
            "valueFrom": {"secretKeyRef": {"name": f"{options.name}-variables", "key": name}},
        }
        for name in dict.fromkeys(named_variables(recipe, role))
    ]


def _probes(*, is_one_pod: bool) -> dict[str, Any]:
    """The health check of docker-compose.yml; it shows the role's own identity.

    A service answers while it computes. One that does not for minutes is started again. Of several
    pods the first one answers, at its address alone.
    """
    check = [*_HEALTH_CHECK, f"127.0.0.1:{SERVICE_PORT}"]
    if not is_one_pod:
        text = f'exec {" ".join(_HEALTH_CHECK)} "$POD_IP:{SERVICE_PORT}" "$@"'
        check = ["sh", "-c", text, "sh"]

    def probe(entry: str, period_s: int, failures: int) -> dict[str, Any]:
        return {
            "exec": {"command": [*check, *([entry] if entry else [])]},
            "periodSeconds": period_s,
            "timeoutSeconds": 30,
            "failureThreshold": failures,
        }

    return {
        "startupProbe": probe("", 10, 60),
        "readinessProbe": probe("", 30, 3),
        "livenessProbe": probe("liveness", 60, 5),
    }


def _near_each_other(options: KubernetesOptions) -> dict[str, Any]:
    """Has the scheduler prefer a node that has roles of this mesh: rows travel less far."""
    term = {
        "labelSelector": {
            "matchLabels": {**selected_by(options.name), "rolemesh/member": "role"},
        },
        "topologyKey": "kubernetes.io/hostname",
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}


def _disruption_budget(options: KubernetesOptions) -> dict[str, Any]:
    """Nodes are emptied one role at a time: the run goes on from a checkpoint each time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": f"{options.name}-roles", "labels": selected_by(options.name)},
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {
                "matchLabels": {**selected_by(options.name), "rolemesh/member": "role"},
            },
        },
    }
