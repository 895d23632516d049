"""Tests of runs side by side: what is read, what the terminal shows, and the HTML file."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from support.fake_roles import fake_mesh, fake_recipe
from support.fake_runs import make_run
from support.planned_runs import PLAN
from typer.testing import CliRunner

from rolemesh.coordinator.commands.compare import app
from rolemesh.coordinator.commands.policies import compare_page
from rolemesh.coordinator.commands.policies.compare_page import page
from rolemesh.coordinator.commands.terminal.plot import HEIGHT, WIDTH, plot
from rolemesh.coordinator.run.folders.comparison import Curve, Point, compare
from rolemesh.coordinator.run.folders.evaluations import (
    EvaluationFile,
    new_path,
    write_evaluation,
)
from rolemesh.coordinator.run.results.scores import TaskScores
from rolemesh.coordinator.state.memory import MemoryStateStore

HOSTILE = "</title></style><script>alert(1)</script><img src=http://x.example/y onerror='a()'>\"&"


def write_run(
    folder: Path, records: Sequence[Mapping[str, float]], state: str = "succeeded", **changes: Any
) -> Path:
    """A folder as a run leaves it; `changes` are fields of the recipe, "__" for a dot."""
    folder.mkdir(parents=True)
    recipe = fake_recipe(steps=20).model_dump(mode="json")
    for name, value in changes.items():
        *sections, field = name.split("__")
        inner = recipe
        for section in sections:
            inner = inner[section]
        inner[field] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "run.json").write_text(json.dumps({"run_id": f"id-{folder.name}"}))
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines)
    if state != "lost":
        steps = int(records[-1]["step"]) if records else 0
        told = {"state": state, "failure": "", "steps": steps, "recoveries": []}
        (folder / "summary.json").write_text(json.dumps(told))
    return folder


def steps(values: Sequence[float], name: str = "reward/mean") -> list[dict[str, float]]:
    return [{"step": step, name: value} for step, value in enumerate(values, start=1)]


def called(*arguments: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return found.exit_code, found.output


def test_numbers_of_a_metric_are_those_of_the_files(tmp_path: Path) -> None:
    rewards = [0.5, 0.125, 1.0, 0.25, 0.75]
    one = write_run(tmp_path / "one", steps(rewards))
    two = write_run(tmp_path / "two", steps([0.0, 0.5, 0.25]))
    found = compare([one, two])
    curve = found.runs[0].curves["reward/mean"]
    assert (curve.first, curve.last) == (Point(1, 0.5), Point(5, 0.75))
    assert (curve.lowest, curve.highest) == (Point(2, 0.125), Point(3, 1.0))
    assert found.shared_step() == 3
    assert found.headings() == ["first", "last", "lowest", "highest", "at 3"]
    assert found.cells(curve) == ["0.5", "0.75", "0.125 (step 2)", "1 (step 3)", "1"]
    assert found.cells(None) == ["-"] * 5
    assert "different numbers of steps" in found.notes()[0]


def test_of_a_run_that_went_back_the_newest_steps_count_and_what_is_not_finite_is_told(
    tmp_path: Path,
) -> None:
    twice = [*steps([0.1, 0.2, 0.3, 0.4]), *steps([0.0, 0.0, 0.7])[2:]]
    one = write_run(tmp_path / "one", [*twice, {"step": 4, "reward/mean": math.nan}], "lost")
    with (one / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # a killed process wrote it
    two = write_run(tmp_path / "two", [])
    found = compare([one, two])
    assert [(p.step, p.value) for p in found.runs[0].curves["reward/mean"].points] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.7),
    ]
    assert found.runs[0].status.state == "lost"
    assert "one has values that are not finite, left out here: reward/mean 1." in found.notes()
    assert "two has made no step." in found.notes()


def test_a_plan_stands_beside_what_steps_took_and_is_no_difference(tmp_path: Path) -> None:
    taken = [100.0, 100.0, 4.0, 5.0, 6.0]
    records = steps(taken, "time/step")
    found = compare(
        [
            write_run(tmp_path / "planned", records, plan=PLAN),
            write_run(tmp_path / "short", records[:2], plan={**PLAN, "step_s": 3.0}),
            write_run(tmp_path / "bare", records),
        ]
    )
    assert not any(name.startswith("plan") for name in found.differences)
    assert "planned: a step: planned 6 s, measured 5 s (error +20%)." in found.notes()
    assert "short: planned: 3 s a step; too few steps were made to measure one." in found.notes()
    assert not any(note.startswith("bare:") for note in found.notes())


def test_every_field_in_which_recipes_differ_is_there_and_no_password(tmp_path: Path) -> None:
    tracing = {"endpoint": "http://user:secret@host:4317"}
    one = write_run(tmp_path / "one", steps([0.5]), run__seed=3, tracing=tracing)
    two = write_run(tmp_path / "two", steps([0.5]), run__seed=4)
    assert "secret" in (one / "config.yaml").read_text()
    found = compare([one, two])
    assert found.differences["run.seed"] == [3, 4]
    assert {name.partition(".")[0] for name in found.differences} == {"run", "tracing"}
    told = json.dumps(found.differences) + page(found, ["reward/mean"])
    assert "http://***@host" in told
    assert "secret" not in told


async def test_runs_as_they_are_made_are_compared_as_a_table_as_json_and_as_a_page(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, number in zip(folders, (2, 3), strict=True):
        async with fake_mesh() as mesh:
            await make_run(mesh, folder, fake_recipe(steps=number), MemoryStateStore()).execute()
    out = tmp_path / "compare.html"
    code, shown = called(
        *folders, "--metric", "held_out/s*", "--metric", "reward/mean", "--out", out
    )
    assert code == 0
    assert "reward/mean" in shown
    assert "run.steps" in shown
    text = out.read_text()
    assert text.count("<figure") == 3  # held_out/score, held_out/standard_error, reward/mean
    code, shown = called(*folders, "--json", "--metric", "reward/mean")
    assert code == 0
    lines = [json.loads(line) for line in shown.splitlines()]
    assert [line["type"] for line in lines[:3]] == ["run", "run", "metric"]
    records = [json.loads(line) for line in (folders[1] / "metrics.jsonl").read_text().splitlines()]
    curve = lines[2]["runs"]["b"]
    assert curve["values"] == [record["reward/mean"] for record in records]
    assert curve["steps"] == [1, 2, 3]
    told = {line["field"]: line["runs"] for line in lines if line["type"] == "difference"}
    assert told == {"run.steps": {"a": 2, "b": 3}}


class Tags(HTMLParser):
    """Names of elements, names and values of attributes, and text outside of styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        assert self.open == ["meta", "meta", "meta"]  # elements without an end

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.open.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        while self.open[-1] == "meta" != tag:
            self.open.insert(0, self.open.pop())
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_of_recipes_and_names_stays_text_in_the_page_which_loads_nothing(
    tmp_path: Path,
) -> None:
    records = steps([0.5, 0.25], HOSTILE)
    changes = {"run__name": HOSTILE, "actor__model__path": HOSTILE}
    one = write_run(tmp_path / "<b>one", records, "failed", **changes)
    summary = json.loads((one / "summary.json").read_text())
    (one / "summary.json").write_text(json.dumps({**summary, "failure": HOSTILE}))
    two = write_run(tmp_path / "two", records)
    found = compare([one, two])
    text = page(found, found.metrics())
    tags = Tags(text)
    assert set(tags.names) <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "figure"),
        *("table", "thead", "tbody", "tr", "th", "td", "figcaption", "strong", "span"),
        *("svg", "line", "polyline", "circle", "text"),
    }
    assert not [name for name, _ in tags.attributes if name.startswith(("on", "src", "href"))]
    assert not [value for _, value in tags.attributes if "url(" in value]
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "--line-1: light-dark" in style
    assert "default-src 'none'" in text
    # It is all there to read: a metric, two fields of a recipe, a failure, a run's name.
    assert tags.text.count(HOSTILE) >= 5
    assert tags.text.count("<b>one") >= 2


def test_a_long_curve_keeps_its_spikes_and_numbers_of_any_size_have_a_chart(
    tmp_path: Path,
) -> None:
    noisy = [0.5] * 5_000
    noisy[1_234], noisy[4_321] = 9.0, -7.0
    thinned = compare_page._thinned([Point(n, value) for n, value in enumerate(noisy)])
    assert len(thinned) <= 2 * compare_page._MAX_POINTS
    assert {Point(1_234, 9.0), Point(4_321, -7.0)} <= set(thinned)
    assert [point.step for point in thinned] == sorted(point.step for point in thinned)
    for values in ([1e308, -1e308], [5e-324, 0.0], [3.0, 3.0], [0.0]):
        folders = [write_run(tmp_path / f"{values}-{place}", steps(values)) for place in range(2)]
        text = page(compare(folders), ["reward/mean"])
        assert "nan" not in text[text.index("<svg") :]
        assert "inf" not in text[text.index("<svg") :]
        curve = compare(folders).runs[0].curves["reward/mean"]
        assert plot([(curve, "")], (1, 2), (curve.lowest.value, curve.highest.value)).plain


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 1.0, [0.0, 0.5, 1.0]), (-0.3, 0.3, [-0.2, 0.0, 0.2]), (1, 20, [5, 10, 15, 20])],
)
def test_ticks_are_round_numbers_within_the_axis(
    low: float, high: float, expected: list[float]
) -> None:
    assert compare_page._ticks(low, high, 4) == expected


def test_a_plot_draws_what_rises_from_the_lower_left_to_the_upper_right() -> None:
    curve = Curve(tuple(Point(step, step / 10) for step in range(11)))
    lines = plot([(curve, "")], (0, 10), (0.0, 1.0)).plain.splitlines()
    assert len(lines) == HEIGHT + 1
    drawn = [line.partition("|")[2] for line in lines[:HEIGHT]]
    assert [len(line) == WIDTH for line in drawn] == [True] + [False] * (HEIGHT - 1)
    # The dots of the ends: lowest left one, highest right one.
    assert ord(drawn[-1][0]) - 0x2800 & 0x40
    assert ord(drawn[0][-1]) - 0x2800 & 0x08
    starts = [len(line) - len(line.lstrip()) for line in drawn]
    assert starts == sorted(starts, reverse=True)
    assert lines[0].startswith("1 |")
    assert lines[-1].split() == ["step", "0", "10"]


def test_without_colours_each_run_has_a_plot_of_its_own(tmp_path: Path) -> None:
    from rolemesh.coordinator.commands import compare as command

    folders = [write_run(tmp_path / name, steps([0.0, 1.0])) for name in ("one", "two")]
    found = compare(folders)
    for settings, number in (({"no_color": True}, 2), ({"color_system": "standard"}, 1)):
        written = io.StringIO()
        console = Console(file=written, width=120, force_terminal=True, **settings)  # type: ignore[arg-type]
        command._show(console, found, [])
        assert written.getvalue().count("step 1") - written.getvalue().count("(step 1") == number


def test_what_cannot_be_compared_is_refused_with_its_reason(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", steps([0.5]))
    two = write_run(tmp_path / "two", steps([0.5]))
    damaged = write_run(tmp_path / "damaged", steps([0.5]))
    (damaged / "metrics.jsonl").write_text("{]\n{]\n")
    bare = write_run(tmp_path / "bare", steps([0.5]))
    (bare / "config.yaml").unlink()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(one)
    for arguments, told in (
        ([one], "1 runs are named: give 2 to 16"),
        ([one, one], "are the same run, 'id-one': name different ones"),
        ([one, tmp_path / "link"], "are the same run, 'id-one'"),
        ([one, tmp_path / "empty"], "empty holds no run"),
        ([one, "no-such-run"], "'no-such-run' is neither a folder nor the id of a run"),
        ([one, damaged], "damaged cannot be read: a file of"),
        ([one, bare], "bare has no config.yaml"),
        ([one, two, "--metric", "kl/*"], "--metric 'kl/*': no run has such a metric; there are"),
        ([one, two, "--metric", "reward/"], "no run has such a metric; use 'reward/*'"),
        ([one, two, "--metric", "reward/maen"], "metric; did you mean reward/mean"),
        ([one, two, "--out", tmp_path / "no" / "x.html"], "x.html cannot be written"),
    ):
        code, shown = called(*arguments)
        assert code == (1 if "--out" in arguments else 2), arguments
        assert told in " ".join(shown.split()), shown


def evaluated(run: Path, step: int, scores: Sequence[float], **drawing: Any) -> None:
    task = TaskScores(name="sums", num_prompts=len(scores), samples=1, full_score=1.0)
    task.scores = {str(at): [score] for at, score in enumerate(scores)}
    found = EvaluationFile(
        policy=run.name, step=step, tasks={"sums": task}, facts={"drawing": drawing}
    )
    write_evaluation(new_path(run / "evaluations", f"step-{step}"), found, run)


def test_evaluations_stand_beside_the_curves_with_a_paired_difference(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", steps([0.1, 0.2, 0.3]))
    two = write_run(tmp_path / "two", steps([0.1, 0.2, 0.3]))
    evaluated(one, 3, [0.0, 0.0, 0.0, 1.0])
    evaluated(two, 3, [1.0, 1.0, 0.0, 1.0])
    found = compare([one, two])
    assert found.runs[0].curves["evaluated/sums/score"].points == (Point(3, 0.25),)
    ((first, second, (task,)),) = found.evaluations()
    assert (first.label, second.label) == ("one", "two")
    assert task.difference is not None
    assert task.difference.mean == 0.5
    assert task.difference.p_value == 0.5
    code, shown = called(one, two, "--out", tmp_path / "page.html")
    assert code == 0
    assert "two minus one" in shown
    assert "+0.500" in shown
    written = (tmp_path / "page.html").read_text()
    assert "Evaluations: the second minus the first" in written
    assert "+0.500 [" in written
    lines = [json.loads(line) for line in called(one, two, "--json")[1].splitlines()]
    (told,) = [line for line in lines if line["type"] == "evaluation"]
    assert told["difference"]["num_prompts"] == 4


def test_what_was_drawn_in_different_ways_is_not_compared(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / name, steps([0.1])) for name in ("one", "two"))
    evaluated(one, 1, [0.0], samples=1)
    evaluated(two, 1, [1.0], samples=4)
    found = compare([one, two])
    assert list(found.evaluations()) == []
    assert any("drawn in different ways" in note for note in found.notes())


def test_a_broken_evaluation_is_named(tmp_path: Path) -> None:
    one, two = (write_run(tmp_path / name, steps([0.1])) for name in ("one", "two"))
    evaluated(one, 1, [0.0])
    next((one / "evaluations").iterdir()).write_text("{")
    code, shown = called(one, two)
    assert code == 2
    assert "is no evaluation" in " ".join(shown.split())
