"""Tests that the fixtures of these tests leave nothing on an engine, however a test ends."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
from support.container_mesh import Images, container_mesh, docker, left_overs

pytestmark = pytest.mark.containers


class SomeTestFailedError(Exception):
    """Stands for what a test may raise."""


def fail_on_a_mesh(project: str, folder: Path) -> NoReturn:
    with container_mesh(project, folder) as mesh:
        mesh.compose("up", "--detach", "--wait", "store")
        # As runs are started, by a name that Compose did not choose.
        mesh.compose(
            *("run", "--detach", "--no-deps", "--name", f"{project}-run"),
            *("--entrypoint", "python", "coordinator", "-c", "import time; time.sleep(600)"),
        )
        kinds = {one.split()[0] for one in left_overs(project)}
        assert kinds == {"container", "network", "volume"}
        assert docker("ps", "--quiet", "--filter", f"name={project}-run").stdout
        raise SomeTestFailedError


def test_a_mesh_leaves_nothing_behind_when_a_test_fails(
    images: Images, project: str, tmp_path: Path
) -> None:
    name = f"{project}-clean-up"
    with pytest.raises(SomeTestFailedError):
        fail_on_a_mesh(name, tmp_path)
    assert left_overs(name) == []
    # By name as well: a label may be missing, too.
    assert not docker("ps", "--all", "--quiet", "--filter", f"name={name}").stdout
