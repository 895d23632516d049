"""The panel of a mixture's experts: a heat map and a table of loads; nothing without experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from support.dashboard_pages import is_painted
from support.page_server import PageServer

from rolemesh.coordinator.state.store import RunRecord, RunState, RunStream
from rolemesh.v1 import coordinator_pb2, experience_pb2

Loads = Mapping[str, Mapping[int, Sequence[int]]]
STEPS: dict[int, Loads] = {
    1: {"actor": {1: [4, 4, 4, 4], 3: [16, 0, 0, 0]}},
    2: {"actor": {1: [6, 2, 4, 4], 3: [0, 8, 0, 8]}, "critic": {0: [9, 3]}},
}


def write_loads(server: PageServer, run_id: str, step: int, loads: Loads) -> None:
    roles = [
        coordinator_pb2.RoleLoads(
            role=role,
            layers=[
                experience_pb2.LayerLoads(layer=layer, choices=choices)
                for layer, choices in layers.items()
            ],
        )
        for role, layers in loads.items()
    ]
    payload = coordinator_pb2.GetExpertLoadsResponse(step=step, roles=roles).SerializeToString()
    server.call(server.store.append_entry(run_id, RunStream.EXPERTS, payload, step=step))


def write_run(server: PageServer, run_id: str, folder: Path, steps: Mapping[int, Loads]) -> None:
    """A run that goes on, of which there are loads of experts and metrics alone."""
    record = RunRecord(
        run_id=run_id, name=run_id, num_steps=9, step=max(steps), directory=str(folder),
        created_at=1.0, updated_at=2.0, state=RunState.RUNNING,
    )  # fmt: skip
    server.call(server.store.create_run(record))
    for step in range(1, max(steps) + 1):
        server.call(server.store.append_metrics(run_id, {"step": float(step), "loss": 0.5}))
    for step, loads in steps.items():
        write_loads(server, run_id, step, loads)


@pytest.fixture(scope="module")
def mixture(server: PageServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    write_run(server, "mixture", tmp_path_factory.mktemp("mixture"), STEPS)
    return "mixture"


@pytest.fixture
def page(looked_at: Any, mixture: str) -> Any:
    # It has no graphs and samples: what else the page asks for is not found.
    return looked_at(mixture, is_quiet=False)


def cells(page: Page) -> list[list[str]]:
    rows: list[list[str]] = page.get_by_role("region", name="Loads of experts").evaluate(
        "(box) => [...box.querySelectorAll('tr')].map((row) => [...row.cells]"
        ".map((cell) => cell.textContent))"
    )
    return rows


def pixel(page: Page, row: float, column: float, *, rows: int, columns: int) -> list[int]:
    """Red, green, blue and opacity in the middle of a cell."""
    found: list[int] = page.locator("#experts canvas").evaluate(
        """(canvas, [row, column, rows, columns]) => {
          const height = (canvas.height - 18 * devicePixelRatio) / rows;
          const at = [((column + 0.5) * canvas.width) / columns, (row + 0.5) * height];
          return [...canvas.getContext("2d").getImageData(...at.map(Math.floor), 1, 1).data];
        }""",
        [row, column, rows, columns],
    )
    return found


def test_the_newest_step_is_drawn_and_told_in_words(page: Any) -> None:
    expect(page.locator("#experts")).to_be_visible()
    expect(page.get_by_role("link", name="Experts")).to_be_visible()
    told = (
        "Choices of each expert over the mean of its layer, of the actor in step 2; 1 is even. "
        "Most uneven is layer 3: expert 1 has 2 times the mean."
    )
    expect(page.locator("#experts-body")).to_contain_text(told)
    plot = page.locator("#experts .heat-plot")
    expect(plot).to_have_attribute("aria-label", f"Heat map of 2 layers and 4 experts. {told}")
    expect(page.locator("#experts .heat-names div")).to_have_text(["layer 1", "layer 3"])
    expect(page.locator("#experts .heat-newest div")).to_have_text(["1.5", "2"])
    assert is_painted(page, "#experts") == [True]
    drawn = [
        [pixel(page, row, column, rows=2, columns=4) for column in range(4)] for row in range(2)
    ]
    # Layer 1 has loads of 1.5, 0.5, 1 and 1, layer 3 of 0, 2, 0 and 2.
    more, less, *even = drawn[0]
    assert [one[3] for one in even] == [0, 0]
    none, twice = drawn[1][0], drawn[1][1]
    assert none[3] == 255
    # Half is as far from even as twice.
    assert less[3] == pytest.approx(twice[3], abs=1)
    assert 0 < more[3] < twice[3] < 255
    # What is above the mean and what is below it have colours of their own.
    assert more[2] > more[0]
    assert none[0] > none[2]
    assert less[0] > less[2]


def test_a_reader_without_eyes_has_the_table(page: Any) -> None:
    button = page.get_by_role("button", name="Loads of experts as a table")
    expect(button).to_have_attribute("aria-expanded", "false")
    button.focus()
    page.keyboard.press("Enter")
    expect(button).to_have_attribute("aria-expanded", "true")
    heads = ["Layer", "Most", "its expert", "Least", "its expert"]
    assert cells(page) == [
        [*heads, "expert 0", "expert 1", "expert 2", "expert 3"],
        ["1", "1.5", "0", "0.5", "1", "1.5", "0.5", "1", "1"],
        ["3", "2", "1", "0", "0", "0", "2", "0", "2"],
    ]
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Loads of experts")).to_be_hidden()


def test_a_cell_tells_its_numbers_to_pointer_and_keys(page: Any) -> None:
    plot, tip = page.locator("#experts .heat-plot"), page.locator("#tip")
    plot.focus()
    page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("layer 1 \u00b7 expert 0")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    expect(tip).to_contain_text("layer 3 \u00b7 expert 3")
    expect(tip.locator("dd")).to_have_text(["2", "8", "50 %"])
    box = plot.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 3 / 8, box["y"] + 10)
    expect(tip).to_contain_text("layer 1 \u00b7 expert 1")
    expect(tip.locator("dd")).to_have_text(["0.5", "2", "13 %"])


def test_a_picked_step_and_model_stay_and_the_newest_step_is_followed(
    opened: Any, server: PageServer, tmp_path: Path
) -> None:
    write_run(server, "followed", tmp_path, STEPS)
    page = opened("followed", is_quiet=False)
    step = page.get_by_label("Step of the experts")
    assert step.locator("option").all_text_contents() == ["newest (step 2)", "step 2", "step 1"]
    role = page.get_by_label("Model whose experts are shown")
    role.select_option("critic")
    expect(page.locator("#experts-body")).to_contain_text(
        "of the critic in step 2; 1 is even. Most uneven is layer 0: expert 0 has 1.5 times"
    )
    expect(page.locator("#experts .heat-names div")).to_have_text(["layer 0"])
    # The critic of the first step was no mixture: the actor is shown, and there is no choice.
    step.select_option("1")
    expect(page.locator("#experts-body")).to_contain_text(
        "of the actor in step 1; 1 is even. Most uneven is layer 3: expert 0 has 4 times the mean."
    )
    expect(role).to_be_hidden()
    step.select_option("0")
    body = page.locator("#experts-body")

    def make(number: int, choices: list[int]) -> None:
        write_loads(server, "followed", number, {"actor": {1: choices}})
        metrics = {"step": float(number), "experts/load_ratio": 2.0}
        server.call(server.store.append_metrics("followed", metrics))
        made = coordinator_pb2.RunEvent(step_made=coordinator_pb2.StepMade(metrics=metrics))
        server.tell("followed", made, step=number)

    make(3, [0, 8, 0, 8])
    expect(body).to_contain_text("in step 3; 1 is even. Most uneven is layer 1: expert 1 has 2")
    step.select_option("2")
    expect(body).to_contain_text("in step 2")
    make(4, [8, 0, 0, 0])
    expect(step.locator("option").first).to_have_text("newest (step 4)")
    expect(body).to_contain_text("in step 2")
    page.keyboard.press("f")
    expect(body).to_contain_text("in step 4; 1 is even. Most uneven is layer 1: expert 0 has 4")


def test_a_step_without_loads_is_told_of(opened: Any, server: PageServer, tmp_path: Path) -> None:
    """It was made before those that are kept, or it was skipped."""
    write_run(server, "gaps", tmp_path, {2: STEPS[1], 3: STEPS[1]})
    page = opened("gaps", is_quiet=False)
    expect(page.locator("#experts-body")).to_contain_text("in step 3")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    # Enter on a chart shows the step in all panels.
    plot = page.locator('figure[data-chart="Loss"] .plot')
    plot.focus()
    for key in ("Home", "Enter"):
        page.keyboard.press(key)
    expect(page.locator("#experts-body")).to_contain_text("The loads of step 1 are not kept.")
    assert not any("/experts?step=1" in url for url in asked)
    expect(page.locator("#experts .heat")).to_be_hidden()
    page.get_by_label("Step of the experts").select_option("0")
    expect(page.locator("#experts-body")).to_contain_text("in step 3")


def test_a_run_without_experts_shows_nothing_of_them(
    opened: Any, server: PageServer, tmp_path: Path
) -> None:
    page = opened("live")
    expect(page.locator("#experts")).to_be_hidden()
    expect(page.get_by_role("link", name="Experts")).to_have_count(0)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    step = server.make_step("live")
    expect(page.locator("#progress-text")).to_contain_text(str(step))
    assert not any("/experts" in url for url in asked)
    # The panel goes with the run that it tells of, which has no graph.
    write_run(server, "left", tmp_path, STEPS)
    other = opened("left", is_quiet=False)
    expect(other.locator("#experts .heat-names div").first).to_be_visible()
    other.locator("#run").select_option("live")
    expect(other.locator("#experts")).to_be_hidden()


def test_a_large_mixture_has_a_summary_where_a_table_would_be_too_large(
    opened: Any, server: PageServer, tmp_path: Path
) -> None:
    layers = {layer: [1] * 511 + [layer] for layer in range(1, 49)}
    write_run(server, "large", tmp_path, {1: {"actor": layers}})
    page = opened("large", is_quiet=False)
    page.get_by_role("button", name="Loads of experts as a table").click()
    rows = cells(page)
    assert [len(row) for row in rows] == [5] * 49
    assert rows[1][:3] == ["1", "1", "0"]
    assert rows[48] == ["48", "43.96", "511", "0.9159", "0"]
    assert is_painted(page, "#experts") == [True]


def test_a_hostile_role_stays_text(opened: Any, server: PageServer, tmp_path: Path) -> None:
    hostile = '<img src=x onerror="window.stolen=1">'
    write_run(server, "hostile-role", tmp_path, {1: {hostile: {0: [0, 0]}, "actor": {0: [1, 1]}}})
    page = opened("hostile-role", is_quiet=False)
    expect(page.locator("#experts-body")).to_contain_text(f"of the {hostile} in step 1")
    expect(page.locator("#experts-body")).to_contain_text("Nothing was chosen.")
    assert page.locator("#experts img").count() == 0
    assert page.evaluate("window.stolen") is None
