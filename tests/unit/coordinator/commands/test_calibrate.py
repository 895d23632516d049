"""`rolemesh calibrate` and what `rolemesh plan` makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from support.calibrations import KNOWN, MACHINE, primitives
from support.mapping_jobs import LLAMAS

from rolemesh.coordinator.commands import calibrate, plan
from rolemesh.coordinator.mapping.calibration.calibration import calibrated, read_calibration
from rolemesh.coordinator.mapping.machines.devices import device_of
from rolemesh.coordinator.run.tuning.calibrations import default_place

RECIPE = """
run: {{name: planned, steps: 1, prompts_per_step: 64}}
algorithm:
  type: grpo
  sampling: {{samples_per_prompt: 2, max_new_tokens: 64}}
  mini_batch_rows: 64
actor:
  model: {{path: {model}}}
  rollout: {{type: vllm, max_model_len: 128}}
  data: {{type: jsonl, path: data.jsonl}}
reference: {{model: {{path: {model}}}}}
reward: {{source: {{type: arithmetic}}}}
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMAS["7B"]))
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(model=tmp_path / "model"))
    return file


def written(file: Path, device: str = "h100") -> Path:
    found = calibrated(device_of(device), primitives(device_of(device), KNOWN), [], [], MACHINE)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found.to_dict()))
    return file


def output(app: Any, *arguments: str | Path, code: int = 0) -> str:
    result = typer.testing.CliRunner().invoke(app, [str(one) for one in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def planned(*arguments: str | Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(
        output(plan.app, *arguments, "--gpus=4", "--gpu=h100", "--json")
    )
    return told


def test_a_plan_stands_on_the_calibration_that_is_given(recipe: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "mine.json")
    bare, found = planned(recipe), planned(recipe, "--calibration", file)
    assert "seconds are assumptions" in bare["basis"]
    assert found["basis"] == read_calibration(file).basis()
    # KNOWN is slower in everything.
    assert found["period"] > 1.2 * bare["period"]
    shown = output(plan.app, recipe, "--gpus=4", "--gpu=h100", "--calibration", file)
    assert "predicted: measured on a machine (h100) on 2026-11-23" in shown
    target = tmp_path / "planned.yaml"
    output(plan.app, recipe, "--gpus=4", "--gpu=h100", "--calibration", file, "--write", target)
    assert "measured on a machine" in target.read_text()


def test_a_plan_finds_the_calibration_where_calibrate_writes_it(recipe: Path) -> None:
    assert "assumptions" in planned(recipe)["basis"]
    written(default_place("cpu"), "cpu")
    assert "assumptions" in planned(recipe)["basis"]
    written(default_place("h100"))
    assert "measured on a machine (h100)" in planned(recipe)["basis"]


def test_a_kind_without_a_calibration_is_said_to_have_none(recipe: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "mine.json")
    kinds = ("--gpus=4", "--gpu=h100", "--gpus=4", "--gpu=l40s")
    told = json.loads(output(plan.app, recipe, *kinds, "--calibration", file, "--json"))
    assert told["basis"].startswith("measured on a machine (h100)")
    assert told["basis"].endswith("l40s: no machine like this has been measured: seconds are "
                                  "assumptions")  # fmt: skip


def test_a_calibration_that_does_not_fit_the_plan_is_refused(recipe: Path, tmp_path: Path) -> None:
    def refused(*arguments: str | Path) -> str:
        return output(plan.app, recipe, "--gpus=4", "--gpu=h100", *arguments, code=2)

    other = written(tmp_path / "other.json", "l40s")
    assert "is a calibration of l40s, but the plan has h100" in refused("--calibration", other)
    one, two = written(tmp_path / "one.json"), written(tmp_path / "two.json")
    text = refused("--calibration", one, "--calibration", two)
    assert "is a second calibration of h100: give one" in text
    one.write_text(one.read_text().replace('"matmul": 0.', '"matmul": 9.', 1))
    assert "matmul is 9." in refused("--calibration", one)
    # Also where nothing names it.
    default_place("h100").parent.mkdir(parents=True)
    default_place("h100").write_text("{}")
    assert "rolemesh_calibration is None" in refused()


def test_a_calibration_is_fitted_anew_without_measuring(tmp_path: Path) -> None:
    file = written(default_place("cpu"), "cpu")
    before = read_calibration(file)
    told = json.loads(output(calibrate.app, "--no-measure", "--json"))
    assert told["file"] == str(file)
    assert read_calibration(file).coefficients == before.coefficients
    shown = output(calibrate.app, "--no-measure")
    assert "error" in shown
    assert "network 0.85 (assumed)" in shown
    assert "measured on a machine (cpu)" in shown


def test_wrong_asking_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in output(calibrate.app, "--no-measure", code=2)
    assert "'h900' is no device" in output(calibrate.app, "--gpu", "h900", code=2)
    file = written(tmp_path / "mine.json", "l40s")
    text = output(calibrate.app, "--no-measure", "--out", file, code=2)
    assert "is of l40s, but --gpu is cpu" in text
    assert "has no config.yaml" in output(calibrate.app, "--run", tmp_path, code=2)
