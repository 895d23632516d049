"""Addresses of the files of saved adapters."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from rolemesh.coordinator.tinker import downloads as module
from rolemesh.coordinator.tinker.downloads import Downloads
from rolemesh.coordinator.tinker.sessions import UnknownError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter" / "sub").mkdir(parents=True)
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter" / "sub" / "weights").write_bytes(b"\0" * 1000)
    (tmp_path / "secret").write_text("no")
    return tmp_path / "adapter"


def test_files_are_had_by_their_addresses(folder: Path) -> None:
    downloads = Downloads()
    token, names, _ = downloads.offer(folder)
    assert names == ["adapter_config.json", "sub/weights"]
    for name in names:
        assert downloads.file(token, name) == folder / name
    with downloads.archive(token) as file, tarfile.open(fileobj=file) as tar:
        assert {one.name: one.size for one in tar} == {
            "adapter_config.json": 2,
            "sub/weights": 1000,
        }
        assert {one.uname for one in tar} == {""}


def test_nothing_else_is_had(folder: Path) -> None:
    downloads = Downloads()
    token, *_ = downloads.offer(folder)
    for wrong in ("../secret", "sub", "other", str(folder / "adapter_config.json")):
        with pytest.raises(UnknownError):
            downloads.file(token, wrong)
    with pytest.raises(UnknownError, match="ask for another one"):
        downloads.file("guessed", "adapter_config.json")


def test_an_address_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "time", lambda: now)
    downloads = Downloads()
    token, names, expires_at = downloads.offer(folder)
    now = expires_at - 1
    assert downloads.file(token, names[0])
    now = expires_at
    with pytest.raises(UnknownError):
        downloads.file(token, names[0])
    with pytest.raises(UnknownError):
        downloads.archive(token)


def test_no_more_addresses_hold_than_there_may_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_LINKS", 2)
    downloads = Downloads()
    first, second, third = (downloads.offer(folder)[0] for _ in range(3))
    with pytest.raises(UnknownError):
        downloads.archive(first)
    for token in (second, third):
        downloads.archive(token).close()
