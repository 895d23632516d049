"""The coordinator of a mesh on Kubernetes: a Job that makes one run and ends with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.render.kubernetes_options import KubernetesOptions
from rolemesh.coordinator.render.nodes import address_setting
from rolemesh.coordinator.render.pods import (
    CONFINED,
    ROLE_USERS,
    Volumes,
    headless_service,
    identity_container,
    labels_of,
    pod_security,
)

SERVICE_PORT = 50051
"""Of each role."""
MEMBER_PORT = 29300
"""Where services register at the coordinator."""

_RECIPE_FOLDER = "/mesh/recipe"


def coordinator_manifests(
    recipe: Recipe, files: Sequence[str], settings: Sequence[str], options: KubernetesOptions
) -> list[dict[str, Any]]:
    """The Job, and a name for its pod where services of the recipe register.

    Args:
        recipe: The recipe.
        files: Names of its files.
        settings: Texts of `--set`.
        options: Of the mesh.
    """
    volumes = Volumes(options.name, options.claim)
    names = ["coordinator.pem", "client-drive.pem"]
    identity = identity_container(volumes, "coordinator", names, options.coordinator_image)
    volumes.add_secret("store-password", f"{options.name}-store")
    volumes.add_secret("api-token", f"{options.name}-api")
    volumes.add_config("recipe", f"{options.name}-recipe")
    volumes.add_disk("tmp", 256 << 20)
    settings = [*settings]
    environment = {
        "ROLEMESH_CERTIFICATES": "/mesh/identity",
        # kubectl port-forward reaches it there, and nothing else does.
        "ROLEMESH_API__HOST": "127.0.0.1",
        "ROLEMESH_API__HTTP_PORT": "8321",
        "ROLEMESH_API__GRPC_PORT": "50050",
        "ROLEMESH_API__TOKEN_FILE": "/mesh/api/token",
        "ROLEMESH_STORE__TYPE": "redis",
        "ROLEMESH_STORE__URL": f"redis://rolemesh@{options.name}-store:6379/0",
        "ROLEMESH_STORE__PASSWORD_FILE": "/mesh/store/password",
    }
    names_pod = []
    if any(recipe.service(role).registers for role in recipe.roles):
        # By certificate, as all calls of other pods then are.
        environment["ROLEMESH_API__HOST"] = "0.0.0.0"
        environment["ROLEMESH_API__MEMBER_PORT"] = str(MEMBER_PORT)
        names_pod = [headless_service(options.name, "coordinator", {"members": MEMBER_PORT})]
    for role in recipe.roles:
        if recipe.service(role).registers:
            continue
        base = f"{options.name}-{role}"
        # Also of the first pod of several.
        addresses = [
            f"{base}-{index}.{base}:{SERVICE_PORT}"
            for index in range(len(recipe.services_of(role)))
        ]
        variable, value = address_setting(role, addresses)
        environment[variable] = value
        if len(addresses) > 1:
            # Pods have addresses instead.
            settings.append(f"services.{role}.replicas=1")
    # Kubernetes would put a variable in the place of $(NAME).
    flags = [word for one in settings for word in ("--set", one.replace("$(", "$$("))]
    container = {
        "name": "coordinator",
        "image": options.coordinator_image,
        # A container that is started again goes on with its run.
        "args": ["train", "--restartable", *(f"{_RECIPE_FOLDER}/{file}" for file in files), *flags],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "securityContext": CONFINED,
        "volumeMounts": [
            {"name": "identity", "mountPath": "/mesh/identity", "readOnly": True},
            {"name": "store-password", "mountPath": "/mesh/store", "readOnly": True},
            {"name": "api-token", "mountPath": "/mesh/api", "readOnly": True},
            {"name": "recipe", "mountPath": _RECIPE_FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            *volumes.folders(writes_runs=True),
        ],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": f"{options.name}-coordinator",
            "labels": labels_of(options.name, "coordinator"),
        },
        "spec": {
            # A run that fails for good fails each time.
            "backoffLimit": 3,
            "template": {
                "metadata": {
                    "labels": {
                        **labels_of(options.name, "coordinator"),
                        "rolemesh/member": "coordinator",
                    },
                },
                "spec": {
                    **pod_security(ROLE_USERS["actor"]),
                    "restartPolicy": "OnFailure",
                    # SIGTERM ends the run after the step in progress, with everything saved.
                    "terminationGracePeriodSeconds": 600,
                    "initContainers": [identity],
                    "containers": [container],
                    "volumes": volumes.listed,
                },
            },
        },
    }
    return [*names_pod, job]
