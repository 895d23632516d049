"""Tests of what a run is resumed from, and of which fields of its recipe may change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.fake_recipes import fake_recipe

from rolemesh.coordinator.dataflow.journal import Journal
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.folders.folder import NoRunError, run_of_id, unfinished_run
from rolemesh.coordinator.run.saving.checkpoints import (
    COMMITTED,
    NoWholeCheckpointError,
    checkpoint_folder,
)
from rolemesh.coordinator.run.saving.progress import RECORD_OPERATION, RunProgress
from rolemesh.coordinator.run.saving.resume import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    RUN_FILE,
    ResumeError,
    check_changes,
    open_run,
    reached,
)
from rolemesh.coordinator.state.memory import MemoryStateStore


def changed(**fields: Any) -> Recipe:
    """The fake recipe with fields set, by dotted names with "__"."""
    values = fake_recipe().model_dump(mode="json")
    for name, value in fields.items():
        *parents, last = name.split("__")
        section = values
        for parent in parents:
            section = section[parent]
        section[last] = value
    return Recipe.model_validate(values)


def write_run(folder: Path, run_id: str = "r", recipe: Recipe | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    values = (recipe or fake_recipe()).model_dump(mode="json")
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(values))
    (folder / RUN_FILE).write_text(json.dumps({"run_id": run_id}))
    return folder


def test_how_long_where_and_how_fast_a_run_goes_on_may_change() -> None:
    wanted = changed(
        run__steps=9,
        run__checkpoint__every_steps=3,
        run__evaluation__every_steps=2,
        run__checkpoint__keep_best={"mode": "min"},
        run__early_stopping={"patience": 3},
        actor__optimizer__learning_rate=1e-6,
        actor__optimizer__schedule={"type": "cosine"},
        critic__train={"dp": 2},
        services={"actor": {"address": "10.0.0.1:50051"}},
        certificates="certs",
    )
    told = check_changes(fake_recipe(), wanted)
    assert "run.steps was 4, is 9" in told
    assert "actor.optimizer.schedule.type was 'constant', is 'cosine'" in told
    assert any(line.startswith("critic.train.dp was 1, is 2") for line in told)
    assert any(line.startswith("services") for line in told)


def test_an_equal_recipe_has_no_changes() -> None:
    assert check_changes(fake_recipe(), fake_recipe()) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run__seed", 5),
        ("run__prompts_per_step", 7),
        ("actor__model__path", "/models/other"),
        ("actor__optimizer__max_grad_norm", 0.5),
        ("algorithm__mini_batch_rows", 2),
    ],
)
def test_what_decides_what_is_learnt_may_not_change(field: str, value: Any) -> None:
    name = field.replace("__", ".")
    with pytest.raises(ResumeError, match=rf"{name} was .*, is .*old values, or start another run"):
        check_changes(fake_recipe(), changed(**{field: value}))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match=r"holds no run that could be resumed.*rolemesh train"):
        open_run(tmp_path)


def test_a_run_s_recipe_comes_back_as_it_was(tmp_path: Path) -> None:
    found = open_run(write_run(tmp_path, "id-7"))
    assert (found.run_id, found.recipe) == ("id-7", fake_recipe())


def test_a_recipe_that_cannot_be_read_any_more_says_so(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / CONFIG_FILE).write_text("run: {name: 7")
    with pytest.raises(ResumeError, match=r"cannot be resumed.*not valid YAML"):
        open_run(tmp_path)


async def committed(store: MemoryStateStore, steps: int) -> None:
    journal = Journal(store, "r", await store.next_epoch("r"))
    await journal.commit(0, {"actor_version": 0})
    for step in range(1, steps + 1):
        record = {"step": step, "loss": 0.5 * step}
        made = {"next_prompt": 3 * step, "actor_version": 2 * step, "record": record}
        await journal.commit(step, made)
        if step < steps:
            await journal.note(step, RECORD_OPERATION, {"record": {**record, "held_out": 1.0}})


async def test_the_journal_says_what_was_reached(tmp_path: Path) -> None:
    store = MemoryStateStore()
    await committed(store, 3)
    progress, where = await reached(store, "r", tmp_path)
    assert where == "its journal: 3 steps"
    assert (progress.step, progress.next_prompts) == (3, [0, 3, 6, 9])
    assert progress.actor_versions == [0, 2, 4, 6]
    assert [record["held_out"] for record in progress.records] == [1.0, 1.0]
    # The newest step was committed, but its process died before it told of it.
    assert progress.unrecorded == {"step": 3, "loss": 1.5}
    assert progress.epoch == 1


async def test_a_journal_goes_back_where_the_run_did(tmp_path: Path) -> None:
    store = MemoryStateStore()
    await committed(store, 3)
    epoch = await store.next_epoch("r")
    await store.rewind("r", 1, epoch=epoch)
    progress, _ = await reached(store, "r", tmp_path)
    assert (progress.step, progress.next_prompts, progress.unrecorded) == (1, [0, 3], None)
    assert [record["step"] for record in progress.records] == [1]
    assert progress.epoch == epoch


async def test_a_store_that_has_lost_the_journal_is_told_and_a_checkpoint_takes_its_place(
    tmp_path: Path,
) -> None:
    whole = RunProgress()
    for step in (1, 2):
        whole.commit(step, 3 * step, 2 * step, {"step": step})
        whole.recorded({"step": step, "loss": 0.5 * step})
    folder = checkpoint_folder(tmp_path / CHECKPOINTS_FOLDER, 2)
    folder.mkdir(parents=True)
    marker = {"run_id": "r", "epoch": 4, "roles": {}, **whole.to_dict(whole.step)}
    (folder / COMMITTED).write_text(json.dumps(marker))
    lines = [json.dumps({"step": step, "loss": 0.5 * step}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo')
    progress, where = await reached(MemoryStateStore(), "r", tmp_path)
    assert "the checkpoint of step 2, since the store has lost the run's journal" in where
    assert (progress.step, progress.next_prompts, progress.epoch) == (2, [0, 3, 6], 4)
    assert [record["step"] for record in progress.records] == [1, 2]


async def test_markers_that_cannot_be_read_are_not_taken_for_none(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path / CHECKPOINTS_FOLDER, 2)
    folder.mkdir(parents=True)
    (folder / COMMITTED).write_text("{")
    with pytest.raises(NoWholeCheckpointError, match=rf"step 2: {folder}/COMMITTED cannot be read"):
        await reached(MemoryStateStore(), "r", tmp_path)
    # Where the journal is left, the roles may still hold the state that it tells of.
    store = MemoryStateStore()
    await committed(store, 1)
    progress, where = await reached(store, "r", tmp_path)
    assert (progress.step, where) == (1, "its journal: 1 steps")
    (folder / COMMITTED).unlink()
    progress, where = await reached(MemoryStateStore(), "r", tmp_path)
    assert (progress.step, where) == (0, "its recipe: it has made no step")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    _, where = await reached(MemoryStateStore(), "r", tmp_path)
    assert where.startswith("its recipe: the store has lost its journal")


def test_a_run_is_found_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "a", "first")
    write_run(tmp_path / "runs" / "b", "second")
    assert run_of_id("second") == Path("runs/b")
    with pytest.raises(NoRunError, match="'third' is neither a folder nor the id of a run"):
        run_of_id("third")


@pytest.mark.parametrize(
    ("file", "text"),
    [("config.yaml", "run: ["), ("config.yaml", "{}"), ("summary.json", "[1]")],
)
def test_a_damaged_folder_is_named_where_the_run_to_go_on_with_is_looked_for(
    file: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path / "runs" / "mine")
    (folder / file).write_text(text)
    with pytest.raises(NoRunError, match=r"runs/mine cannot be read, .* name the folder .* --out"):
        unfinished_run(fake_recipe().run.name, None)


def test_only_a_run_that_has_not_succeeded_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = fake_recipe().run.name
    assert unfinished_run(name, None) is None
    write_run(tmp_path / "runs" / "other", recipe=changed(run__name="other"))
    assert unfinished_run(name, None) is None
    folder = write_run(tmp_path / "runs" / "mine")
    assert unfinished_run(name, None) == Path("runs/mine")
    assert unfinished_run(name, folder) == folder
    for state, found in (("failed", Path("runs/mine")), ("stopped", Path("runs/mine"))):
        (folder / "summary.json").write_text(json.dumps({"state": state}))
        assert unfinished_run(name, None) == found
    (folder / "summary.json").write_text(json.dumps({"state": "succeeded"}))
    assert unfinished_run(name, None) is None
