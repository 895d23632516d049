"""Owners by their API keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rolemesh.coordinator.tinker.routes.keys import LOCAL_OWNER, ForbiddenKeyError, Keys

ANN, BOB = "tml-" + "a" * 16, "tml-" + "b" * 16


def test_each_key_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({ANN: "ann", BOB: "bob", ANN + "2": "ann"}))
    keys = Keys.read(path)
    assert [keys.owner(key) for key in (ANN, BOB, ANN + "2")] == ["ann", "bob", "ann"]


@pytest.mark.parametrize("key", ["", ANN[:-1], ANN + "x", ANN.upper(), "tml-\xff"])
def test_a_key_of_nobody_is_refused(key: str) -> None:
    with pytest.raises(ForbiddenKeyError, match="nobody's here: give TINKER_API_KEY another"):
        Keys({ANN: "ann"}).owner(key)


@pytest.mark.parametrize("key", ["", ANN])
def test_without_keys_all_is_one_owners(key: str) -> None:
    assert Keys().owner(key) == LOCAL_OWNER


def test_keys_are_kept_as_hashes() -> None:
    assert ANN not in repr(vars(Keys({ANN: "ann"})))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "JSON object of owners by key"),
        ("{}", "JSON object of owners by key"),
        (f'{{"{ANN}": ""}}', "JSON object of owners by key"),
        (f'{{"{ANN}": 1}}', "JSON object of owners by key"),
        ('{"sk-aaaaaaaaaaaaaaaaaaaaaaaa": "ann"}', "begins with 'sk-aaa': .*'tml-'"),
        ('{"tml-short": "ann"}', "16 further characters"),
    ],
)
def test_a_file_that_holds_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as refused:
        Keys.read(path)
    assert str(path) in str(refused.value)


def test_a_refused_key_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"secret-of-another-service": "ann"}')
    with pytest.raises(ValueError, match="begins with") as refused:
        Keys.read(path)
    assert "secret-of" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json cannot be read"):
        Keys.read(tmp_path / "none.json")
