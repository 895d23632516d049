"""Parts of manifests that do not depend on a recipe: rights, volumes, networks and the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

GROUP = 10001
"""Group of all pods of roles: it may read what the claim holds."""

ROLE_USERS = {
    "actor": 10001,
    "critic": 10001,
    "reference": 10001,
    "teacher": 10001,
    "rollout": 10001,
    "reward": 10002,
    "cost": 10003,
}
"""As in docker-compose.yml."""

_STORE_USER, _STORE_GROUP = 999, 1000
"""Of valkey in its image."""

CONFINED: dict[str, Any] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""securityContext of each container."""

STORE_COMMAND = """\
password=$(cat /given/password)
exec valkey-server - --protected-mode no --appendonly yes --appendfsync always \\
  --save "" <<EOF
user default on nopass -@all +ping
user rolemesh on >$password ~rolemesh:* +@all -@dangerous
EOF
"""
"""That of docker-compose.yml, which gives the reasons."""


def selected_by(name: str) -> dict[str, str]:
    """Labels of all parts of a mesh."""
    return {"app.kubernetes.io/name": "rolemesh", "app.kubernetes.io/instance": name}


def labels_of(name: str, component: str) -> dict[str, str]:
    """Labels of one part of a mesh."""
    return {**selected_by(name), "app.kubernetes.io/component": component}


class Volumes:
    """The volumes of one pod."""

    def __init__(self, name: str, claim: str) -> None:
        """Prepares for a pod of the mesh `name`, whose models, recipes and runs lie in a claim."""
        self.name = name
        self.listed: list[dict[str, Any]] = [
            {"name": "files", "persistentVolumeClaim": {"claimName": claim}}
        ]

    def add_secret(self, volume: str, secret: str) -> None:
        """A Secret, for the pod's group to read."""
        source = {"secretName": secret, "defaultMode": 0o440}
        self.listed.append({"name": volume, "secret": source})

    def add_config(self, volume: str, config_map: str) -> None:
        """A ConfigMap."""
        self.listed.append({"name": volume, "configMap": {"name": config_map}})

    def add_memory(self, volume: str, num_bytes: int) -> None:
        """A folder in memory, of at most that size."""
        source = {"medium": "Memory", "sizeLimit": f"{num_bytes >> 20}Mi"}
        self.listed.append({"name": volume, "emptyDir": source})

    def add_disk(self, volume: str, num_bytes: int) -> None:
        """A folder on the node, of at most that size."""
        self.listed.append({"name": volume, "emptyDir": {"sizeLimit": f"{num_bytes >> 20}Mi"}})

    def folders(self, *, writes_runs: bool) -> list[dict[str, Any]]:
        """Mounts of the claim: the same paths in every pod."""
        mounts: list[dict[str, Any]] = [
            {"name": "files", "mountPath": f"/mesh/{folder}", "subPath": folder, "readOnly": True}
            for folder in (".models", "recipes", "runs")
        ]
        if writes_runs:
            del mounts[-1]["readOnly"]
        return mounts


def identity_container(
    volumes: Volumes, member: str, files: Sequence[str], image: str
) -> dict[str, Any]:
    """Container that copies a member's identity to where its user alone reads it.

    Kubernetes lets a group read the files of a Secret, or they would be root's alone.
    """
    volumes.add_secret("given-identity", f"{volumes.name}-{member}")
    volumes.add_memory("identity", 1 << 20)
    copies = " ".join(f"/given/{file}" for file in files)
    return {
        "name": "identity",
        "image": image,
        "command": ["install", "-m", "0600", *copies.split(), "/mesh/identity/"],
        "securityContext": CONFINED,
        "volumeMounts": [
            {"name": "given-identity", "mountPath": "/given", "readOnly": True},
            {"name": "identity", "mountPath": "/mesh/identity"},
        ],
    }


def pod_security(user: int, group: int = GROUP) -> dict[str, Any]:
    """What each pod of a mesh is not allowed."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": group,
            "fsGroup": group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def headless_service(name: str, component: str, ports: dict[str, int]) -> dict[str, Any]:
    """Names for the pods of a StatefulSet, also while they start."""
    labels = labels_of(name, component)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{name}-{component}", "labels": labels},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": one, "port": port} for one, port in ports.items()],
        },
    }


def network_policies(name: str) -> list[dict[str, Any]]:
    """Nothing goes in or out, but between members of the mesh, and from coordinator to store."""
    own = selected_by(name)
    members = {
        "matchLabels": own,
        "matchExpressions": [{"key": "rolemesh/member", "operator": "Exists"}],
    }
    coordinator = {"matchLabels": {**own, "rolemesh/member": "coordinator"}}
    store = {"matchLabels": {**own, "app.kubernetes.io/component": "store"}}
    store_port = [{"protocol": "TCP", "port": 6379}]
    dns = {
        "to": [
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}}
        ],
        "ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")],
    }
    return [
        _policy(name, "nothing", {"matchLabels": own}, ingress=[], egress=[]),
        # Ranks of a service listen on ports that they choose. Each shows a certificate.
        _policy(
            name,
            "members",
            members,
            ingress=[{"from": [{"podSelector": members}]}],
            egress=[{"to": [{"podSelector": members}]}, dns],
        ),
        _policy(
            name,
            "store",
            store,
            ingress=[{"from": [{"podSelector": coordinator}], "ports": store_port}],
        ),
        _policy(
            name,
            "coordinator",
            coordinator,
            egress=[{"to": [{"podSelector": store}], "ports": store_port}],
        ),
    ]


def _policy(
    name: str,
    what: str,
    pods: dict[str, Any],
    *,
    ingress: list[Any] | None = None,
    egress: list[Any] | None = None,
) -> dict[str, Any]:
    spec: dict[str, Any] = {"podSelector": pods, "policyTypes": []}
    for direction, rules in (("Ingress", ingress), ("Egress", egress)):
        if rules is not None:
            spec["policyTypes"].append(direction)
            spec[direction.lower()] = rules
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{name}-{what}", "labels": selected_by(name)},
        "spec": spec,
    }


def store_manifests(name: str, image: str) -> list[dict[str, Any]]:
    """The store of docker-compose.yml, on a disk of its own."""
    labels = labels_of(name, "store")
    probe = {
        "exec": {"command": ["sh", "-c", "valkey-cli ping | grep -q PONG"]},
        "periodSeconds": 10,
        "timeoutSeconds": 5,
    }
    container = {
        "name": "store",
        "image": image,
        "command": ["sh", "-ec"],
        "args": [STORE_COMMAND],
        "ports": [{"name": "redis", "containerPort": 6379}],
        "securityContext": CONFINED,
        "readinessProbe": probe,
        "livenessProbe": {**probe, "failureThreshold": 6},
        "volumeMounts": [
            {"name": "password", "mountPath": "/given", "readOnly": True},
            {"name": "data", "mountPath": "/data"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    disk = {
        "metadata": {"name": "data"},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "4Gi"}},
        },
    }
    volumes = [
        {"name": "password", "secret": {"secretName": f"{name}-store", "defaultMode": 0o440}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
    ]
    return [
        headless_service(name, "store", {"redis": 6379}),
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": f"{name}-store", "labels": labels},
            "spec": {
                "serviceName": f"{name}-store",
                "replicas": 1,
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
                        **pod_security(_STORE_USER, _STORE_GROUP),
                        "terminationGracePeriodSeconds": 30,
                        "containers": [container],
                        "volumes": volumes,
                    },
                },
                "volumeClaimTemplates": [disk],
            },
        },
    ]
