"""A run of a model (behind a licence) and data of the hub: fetched, trained, sent, and resumed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import yaml
from support import warm_processes
from support.hf_hub import TOKEN, client_environment, serving_hub
from support.mesh_runs import ROLES, CliRun, tiny_model, tiny_recipe

RUN_S = 240


def test_a_run_keeps_the_commit_that_it_began_with_and_the_token_to_itself(tmp_path: Path) -> None:
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    data = {"type": "hf_dataset", "path": "hf:me/rows:main:train"}
    recipe = tiny_recipe(Path("hf:me/tiny"), run__evaluation__num_prompts=0, actor__data=data)
    rows = [{"prompt": f"{n} + 1?", "answer": n + 1} for n in range(16)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    table = {"main/train/0000.parquet": (tmp_path / "rows.parquet").read_bytes()}
    with serving_hub() as hub:
        hub.put("me/rows", table, kind="datasets", branch="refs/convert/parquet")
        commit = hub.put_folder("me/tiny", tiny_model(tmp_path / "model"))
        hub.repos["models", "me/tiny"].is_gated = True
        variables = {**client_environment(hub, home), "HF_TOKEN": TOKEN}
        with contextlib.closing(CliRun(recipe, folder, variables=variables)) as run:
            assert run.wait(RUN_S) == 0, run.output
            assert len(run.metrics()) == 2
            kept = yaml.safe_load((run.out / "config.yaml").read_text())
        models = {role: kept[role]["model"]["path"] for role in ROLES if role != "reward"}
        assert set(models.values()) == {f"hf:me/tiny@{commit}"}
        # The trained model goes to the hub.
        pushed = subprocess.run(
            [sys.executable, "-m", "rolemesh", "export", str(run.out), "--push", "me/trained"],
            capture_output=True,
            text=True,
            env={**os.environ, **warm_processes.everything(), **variables},
            timeout=RUN_S,
        )
        assert pushed.returncode == 0, pushed.stderr
        trained = hub.repos["models", "me/trained"]
        files = trained.commits[trained.branches["main"]]
        assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)
        assert f"me/tiny, commit {commit}".encode() in files["README.md"]
        assert not list(run.out.glob(".export-*"))
        # The branch goes on, and the hub cannot be asked: the run has the same bytes.
        hub.put("me/tiny", {"config.json": b"{}"})
        hub.put("me/rows", {}, kind="datasets", branch="refs/convert/parquet")
        recipe["run"]["steps"] = 3
        variables["HF_HUB_OFFLINE"] = "1"
        flags = ("--resume", str(run.out))
        with contextlib.closing(CliRun(recipe, folder, *flags, variables=variables)) as run:
            assert run.wait(RUN_S) == 0, run.output
            assert len(run.metrics()) == 3
    for file in (*folder.rglob("*"), *home.rglob("*")):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file
