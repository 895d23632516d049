"""Where a policy answers, as people are told, from what a service of any make says."""

from __future__ import annotations

import pytest

from rolemesh.coordinator.dataflow.calls.endpoints import MAX_URL_CHARACTERS, base_url


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("https://node-3.example:9000", "https://node-3.example:9000/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
        ("https://0.0.0.0:8000", "https://10.0.0.7:8000/v1"),
        ("https://[::]:8000", "https://10.0.0.7:8000/v1"),
    ],
)
def test_an_endpoint_is_told_as_a_base_url(told: str, shown: str) -> None:
    assert base_url(told, "10.0.0.7:50051") == shown


@pytest.mark.parametrize(
    "told",
    [
        "",
        "127.0.0.1:8000",
        "ftp://127.0.0.1:8000",
        "http://127.0.0.1",
        "http://127.0.0.1:99999",
        "http://[::1:8000",
        "http://:8000",
        "http://me:secret@127.0.0.1:8000",
        "http://127.0.0.1:8000/v1?api_key=secret",
        "http://127.0.0.1:8000#secret",
        "http://127.0.0.1\n:8000",
        "http://127.0.0.1 \x1b[2J:8000",
        "http://n\u00f6de:8000",
        f"http://{'n' * MAX_URL_CHARACTERS}:8000",
    ],
    ids=repr,
)
def test_what_is_no_plain_url_is_as_if_nothing_was_said(told: str) -> None:
    assert base_url(told, "10.0.0.7:50051") == ""


def test_an_address_that_is_ipv6_takes_the_place_of_all_addresses() -> None:
    assert base_url("https://[::]:8000", "[fd00::7]:50051") == "https://[fd00::7]:8000/v1"
