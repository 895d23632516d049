"""One mesh in containers for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.container_mesh import ContainerMesh, Images, container_mesh, resolve_images


@pytest.fixture(scope="session")
def images() -> Images:
    return resolve_images()


@pytest.fixture(scope="session")
def project() -> str:
    """A name that no other mesh on this engine has."""
    return f"rolemesh-test-{os.getpid()}"


@pytest.fixture(scope="session")
def mesh(
    images: Images, project: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ContainerMesh]:
    """All roles, healthy."""
    folder: Path = tmp_path_factory.mktemp("mesh")
    with container_mesh(project, folder) as started:
        started.start()
        yield started
