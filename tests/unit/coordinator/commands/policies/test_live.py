"""Where `rolemesh evaluate --live` asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolemesh.coordinator.commands.policies import live
from rolemesh.coordinator.commands.policies.live import live_url
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.run.folders.folder import RunStatus


def run_in(monkeypatch: pytest.MonkeyPatch, state: str, **endpoints: str) -> None:
    status = RunStatus(
        directory="run", state=state, step=3, num_steps=9, changed_at=1.0, endpoints=endpoints
    )
    monkeypatch.setattr(live, "read_status", lambda _: status)


def test_the_first_of_several_services_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    run_in(monkeypatch, "running", **{"rollout-1": "http://b:2/v1", "rollout-0": "http://a:1/v1"})
    assert live_url(Path("run")) == "http://a:1/v1"


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("running", "has no endpoint: start a run with `actor.endpoint: {}`"),
        ("recovering", "is recovering and answers nowhere"),
        ("succeeded", "is succeeded and answers nowhere"),
        ("lost", "is lost and answers nowhere"),
    ],
)
def test_a_run_that_answers_nowhere_is_told(
    monkeypatch: pytest.MonkeyPatch, state: str, told: str
) -> None:
    run_in(monkeypatch, state)
    with pytest.raises(RecipeError, match=told):
        live_url(Path("run"))
