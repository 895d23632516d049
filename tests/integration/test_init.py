"""`rolemesh init` writes a recipe that runs unchanged, and says what is wrong with its input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from support import warm_processes
from support.example_servers import EXAMPLES, script
from support.hf_hub import client_environment, serving_hub, use_hub
from support.saved_datasets import write_saved, write_saved_splits
from support.slow_cases import mostly_slow
from support.tiny_models import write_tiny_llama
from typer.testing import CliRunner

from rolemesh.coordinator.commands.cli import app
from rolemesh.coordinator.commands.recipes import new_recipe
from rolemesh.coordinator.commands.recipes.new_recipe import KnownData, Lengths
from rolemesh.coordinator.recipe.loading import load_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.run.checks.footprint import footprint_of
from rolemesh.coordinator.run.checks.start_checks import services_in
from rolemesh.engine.specs import AdapterSpec
from rolemesh.services.preview import guess as looking
from rolemesh.services.preview.guess import Question, guess

ROLEMESH = [sys.executable, "-m", "rolemesh.coordinator.commands.cli"]
ROWS = [{"question": f"What is {n} + 1?", "solution": n + 1, "level": 2} for n in range(30)]
REWARD = """
def f(completions, solution=None, **kwargs):
    return [float(text.count("a")) for text in completions]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # Some tests call the command here, and it asks a process what the data is.
    for name, value in warm_processes.everything().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "rewards.py").write_text(REWARD)
    write_lines(tmp_path / "my.jsonl", ROWS)
    return tmp_path


def write_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rolemesh(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ROLEMESH, *arguments], capture_output=True, text=True, timeout=300)


def made(model: Path, *arguments: str) -> tuple[Recipe, str]:
    """The recipe that is written, after `rolemesh check` has found nothing wrong with it."""
    ended = CliRunner().invoke(app, ["init", "--model", str(model), *arguments])
    assert ended.exit_code == 0, ended.output
    checked = rolemesh("check", "my-recipe.yaml", "--json", "--timeout", "80")
    findings = [json.loads(line) for line in checked.stdout.splitlines()]
    assert checked.returncode == 0, findings
    assert {one["level"] for one in findings} == {"OK"}, findings
    return load_recipe([Path("my-recipe.yaml")]), ended.output


def test_columns_are_found_and_told(model: Path) -> None:
    recipe, output = made(model, "--from", "my.jsonl", "--reward", "rewards.py:f")
    assert recipe.actor is not None
    assert recipe.actor.data.model_dump(exclude_defaults=True) == {
        "path": Path("my.jsonl"),
        "columns": {"prompt": "question", "answer": "solution"},
        "held_out_size": 3,
        "max_prompt_tokens": recipe.sampler.max_model_len - recipe.sampling.max_new_tokens,
    }
    assert recipe.run.evaluation.num_prompts == 3
    for text in (
        "my.jsonl: 30 rows (jsonl)",
        "prompt: column 'question'",
        "expected answer: column 'solution'",
        "metadata: level",
        "rolemesh check my-recipe.yaml",
    ):
        assert text in output
    assert "held out: nothing" not in output
    # Every section explains itself.
    assert Path("my-recipe.yaml").read_text().count("#") > 10


def test_an_adapter_is_trained_where_it_is_asked_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, _ = made(model, "--from", "my.jsonl", "--reward", "rewards.py:f", "--adapter")
    assert recipe.actor is not None
    assert recipe.actor.model.adapter == AdapterSpec(rank=16)
    assert recipe.actor.optimizer.learning_rate == 2e-4
    # The algorithm compares completions with each other, and has no reference.
    assert recipe.reference is None
    # A model with small matrices has room for a small rank alone; a GPU gets larger passes.
    small = write_tiny_llama(Path("small"), hidden_size=8, num_heads=2, num_kv_heads=1)
    monkeypatch.setattr(new_recipe, "num_parameters", lambda folder: 6 * 10**8)
    monkeypatch.setattr(new_recipe, "_sampler", lambda is_tiny: ("hf", '"cuda:0"'))
    Path("my-recipe.yaml").unlink()
    arguments = ["--model", str(small), "--from", "my.jsonl", "--reward", "rewards.py:f"]
    ended = CliRunner().invoke(app, ["init", *arguments, "--adapter"])
    assert ended.exit_code == 0, ended.output
    written = load_recipe([Path("my-recipe.yaml")]).actor
    assert written is not None
    assert written.model.adapter == AdapterSpec(rank=8)
    assert written.model.micro_batch_tokens == 16384


@pytest.mark.parametrize(
    ("size", "devices", "expected"),
    [
        (6 * 10**8, '"cuda:0"', 16384),
        (6 * 10**8, "cpu", 4096),
        (7 * 10**9, '"cuda:0"', 4096),
        (None, '"cuda:0"', 4096),
    ],
)
def test_passes_of_a_small_model_on_a_gpu_are_larger(
    model: Path,
    size: int | None,
    devices: str,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(new_recipe, "num_parameters", lambda folder: size)
    monkeypatch.setattr(new_recipe, "_sampler", lambda is_tiny: ("hf", devices))
    arguments = ["--model", str(model), "--from", "my.jsonl", "--reward", "rewards.py:f"]
    ended = CliRunner().invoke(app, ["init", *arguments])
    assert ended.exit_code == 0, ended.output
    recipe = load_recipe([Path("my-recipe.yaml")])
    assert recipe.actor is not None
    assert recipe.actor.model.micro_batch_tokens == expected


def test_model_and_data_of_the_hub_are_named_as_they_are_given(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {
        "main/train/0000.parquet": ROWS[:20],
        "main/train/0001.parquet": ROWS[20:25],
        "main/test/0000.parquet": ROWS[25:],
        "other/train/0000.parquet": ROWS,
    }
    for name, rows in parts.items():
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), tmp_path / name.replace("/", "-")
        )
    with serving_hub() as hub:
        use_hub(hub, tmp_path / "home", monkeypatch)
        for name, value in client_environment(hub, tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        hub.put_folder("me/tiny", model)
        files = {name: (tmp_path / name.replace("/", "-")).read_bytes() for name in parts}
        hub.put("me/rows", files, kind="datasets", branch="refs/convert/parquet")
        recipe, output = made(
            Path("me/tiny"), "--from", "hf:me/rows:main", "--reward", "rewards.py:f"
        )
        assert recipe.actor is not None
        assert str(recipe.actor.model.path) == "hf:me/tiny"
        assert recipe.actor.data.model_dump(exclude_defaults=True) == {
            "path": Path("hf:me/rows:main"),
            "held_out_split": "test",
            "columns": {"prompt": "question", "answer": "solution"},
            "max_prompt_tokens": recipe.sampler.max_model_len - recipe.sampling.max_new_tokens,
        }
        assert "hf:me/rows:main: 25 rows (hf_dataset)" in output
        flags = ["init", "--model", "me/tiny", "--reward", "rewards.py:f", "--out", "other.yaml"]
        ended = CliRunner().invoke(app, [*flags, "--from", "hf:me/none"])
        assert ended.exit_code == 2
        assert "--from is 'hf:me/none'" in ended.output
        # A split that is named is all that is read.
        ended = CliRunner().invoke(app, [*flags, "--from", "hf:me/rows:main:test"])
        assert "hf:me/rows:main:test: 5 rows" in ended.output
        data: Any = load_recipe([Path("other.yaml")]).section("actor").data
        assert (data.split, data.held_out_split) == ("test", None)


def test_a_step_takes_no_more_prompts_than_are_short_enough(folder: Path, model: Path) -> None:
    rows = [{"prompt": f"{n} + 1?", "answer": n + 1} for n in range(7)]
    write_lines(folder / "eight.jsonl", [*rows, {"prompt": "1 " * 4000, "answer": 0}])
    recipe, output = made(model, "--from", "eight.jsonl", "--reward", "rewards.py:f")
    assert recipe.run.prompts_per_step == 7
    assert "1 prompts of more than" in output


def test_of_many_prompts_the_largest_are_measured_and_some_others(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{n} + 1?", "answer": n + 1} for n in range(40)]
    rows[21:23] = [{"prompt": "1 " * 300, "answer": 0}, {"prompt": "1 " * 400, "answer": 0}]
    write_lines(folder / "many.jsonl", rows)
    every = guess(Question(path=folder / "many.jsonl", model=model))
    monkeypatch.setattr(looking, "_MEASURED", 4)
    monkeypatch.setattr(looking, "LARGE_BYTES", 0)
    some = guess(Question(path=folder / "many.jsonl", model=model))
    assert (some.num_rows, some.num_distinct) == (every.num_rows, every.num_distinct) == (40, 40)
    assert some.train_lengths[:2] == every.train_lengths[:2]
    assert some.held_out_lengths == every.held_out_lengths
    assert every.num_unmeasured == 0
    assert len(some.train_lengths) + some.num_unmeasured == 36
    found = KnownData(folder / "many.jsonl", asdict(some))
    assert "2 or more prompts of more than 100 tokens are left out" in found.told(Lengths(28, 128))


@pytest.mark.slow
def test_a_recipe_with_a_tiny_model_trains_unchanged() -> None:
    ended = rolemesh("init", "--from", "my.jsonl", "--reward", "rewards.py:f", "--tiny")
    assert ended.returncode == 0, ended.stderr
    checked = rolemesh("check", "my-recipe.yaml", "--json", "--timeout", "80")
    assert checked.returncode == 0, checked.stdout
    trained = rolemesh("train", "my-recipe.yaml", "--out", "run")
    assert trained.returncode == 0, trained.stderr
    assert json.loads(Path("run/summary.json").read_text())["state"] == "succeeded"
    # What the check says of the disk is what the run takes.
    recipe = load_recipe([Path("my-recipe.yaml")])
    estimate = footprint_of(recipe, services_in(recipe))
    saved = sum(file.stat().st_size for file in Path("run/checkpoints").rglob("*.safetensors"))
    assert saved == pytest.approx(estimate.checkpoint, rel=0.05)


def write_parquet(path: Path) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path / "my.parquet")
    return "my.parquet"


def write_parquet_folder(path: Path) -> str:
    (path / "parts").mkdir()
    for number in range(2):
        table = pyarrow.Table.from_pylist(ROWS[15 * number : 15 * (number + 1)])
        pyarrow.parquet.write_table(table, path / "parts" / f"{number}.parquet")
    return "parts"


def write_repository(path: Path) -> str:
    (path / "hub" / "data").mkdir(parents=True)
    for split, rows in (("train", ROWS[:20]), ("test", ROWS[20:])):
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(
            table, path / "hub" / "data" / f"{split}-00000-of-00001.parquet"
        )
    return "hub"


def write_one_split(path: Path) -> str:
    return write_saved(path / "saved", ROWS).name


def write_splits(path: Path) -> str:
    return write_saved_splits(path / "splits", train=ROWS[:20], validation=ROWS[20:]).name


@pytest.mark.parametrize(
    ("write", "kind", "split"),
    mostly_slow(
        (0, 2),
        [
            (write_parquet, "parquet", None),
            (write_parquet_folder, "parquet", None),
            (write_repository, "hf_dataset", "test"),
            (write_one_split, "hf_dataset", None),
            (write_splits, "hf_dataset", "validation"),
        ],
    ),
)
def test_tables_and_folders_are_recognised(
    write: Callable[[Path], str], kind: str, split: str | None, folder: Path, model: Path
) -> None:
    recipe, _ = made(model, "--from", write(folder), "--reward", "rewards.py:f")
    assert recipe.actor is not None
    data: Any = recipe.actor.data
    assert data.type == kind
    assert getattr(data, "held_out_split", None) == split
    assert data.held_out_size == (0 if split else 3)
    assert recipe.run.evaluation.num_prompts == (10 if split else 3)


VERL_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if (data_source, extra_info["split"]) != ("gsm8k", "train") or ground_truth != ["4", "four"]:
        raise ValueError((data_source, ground_truth, extra_info))
    return float(solution_str in ground_truth)
"""


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_data_and_function_of_verl_work_as_they_are(ending: str, folder: Path, model: Path) -> None:
    rows = [
        {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": f"{n} times 2 + 2?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": ["4", "four"]},
            "extra_info": {"split": "train", "index": n, "answer": "with steps"},
        }
        for n in range(12)
    ]
    write_lines(folder / "verl.jsonl", rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "verl.parquet")
    (folder / "compute_score.py").write_text(VERL_REWARD)
    recipe, output = made(
        model, "--from", f"verl.{ending}", "--reward", "compute_score.py:compute_score"
    )
    assert recipe.actor is not None
    columns: Any = recipe.actor.data.columns
    assert columns.model_dump(exclude_none=True) == {"answer": "reward_model.ground_truth"}
    assert "metadata: data_source, ability, reward_model, extra_info" in output
    shown = rolemesh("check", "my-recipe.yaml")
    assert "python gives 1 to the first prompt with '4'" in shown.stdout, shown.stdout


@pytest.mark.parametrize(
    ("example", "kind"),
    mostly_slow((0,), [("reward_server.py", "grpc"), ("reward_http_openrlhf.py", "openrlhf")]),
)
def test_a_server_is_taken_by_its_url(example: str, kind: str, model: Path) -> None:
    with script(EXAMPLES / example, "0") as url:
        recipe, _ = made(model, "--from", "my.jsonl", "--reward", url)
    assert recipe.reward is not None
    assert recipe.reward.source.type == kind


CONVERSATIONS = [
    [{"role": "user", "content": f"Hello {n}"}, {"role": "assistant", "content": "Hi"}]
    for n in range(4)
]


@pytest.mark.parametrize(
    ("rows", "arguments", "columns", "answer"),
    mostly_slow(
        (1, 4, 6),
        [
            ([{"prompt": "a", "answer": "b"}], [], {}, "answer"),
            ([{"Question": "a", "note": "b"}], [], {"prompt": "Question"}, None),
            ([{"words": "a", "n": 3}], [], {"prompt": "words"}, None),
            ([{"messages": turns} for turns in CONVERSATIONS], [], {}, None),
            ([{"talk": turns} for turns in CONVERSATIONS], [], {"messages": "talk"}, None),
            ([{"prompt": turns[:1]} for turns in CONVERSATIONS], [], {}, None),
            (
                [{"one": "a", "two": "b", "three": "4"}],
                ["--prompt", "two", "--answer", "three"],
                {"prompt": "two", "answer": "three"},
                "three",
            ),
            ([{"prompt": "a", "solution": [1]}], [], {"answer": "solution"}, "solution"),
            ([{"prompt": "a", "response": CONVERSATIONS[0]}], [], {}, None),
        ],
    ),
)
def test_the_columns_that_are_chosen(
    rows: list[dict[str, Any]],
    arguments: list[str],
    columns: dict[str, str],
    answer: str | None,
    folder: Path,
    model: Path,
) -> None:
    write_lines(folder / "rows.jsonl", rows)
    ended = CliRunner().invoke(
        app,
        [
            *("init", "--from", "rows.jsonl", "--reward", "rewards.py:f", "--model", str(model)),
            *arguments,
        ],
    )
    assert ended.exit_code == 0, ended.output
    recipe = load_recipe([Path("my-recipe.yaml")])
    assert recipe.actor is not None
    assert recipe.actor.data.columns.model_dump(exclude_none=True) == columns
    shown = "expected answer: none" if answer is None else f"expected answer: column {answer!r}"
    assert shown in ended.output
    assert f"held out: nothing of {len(rows)} prompts" in ended.output


@pytest.mark.parametrize(
    ("changes", "message"),
    mostly_slow(
        (0, 2, 3, 7, 10, 14, 18, 21, 24, 27),
        [
            ({"--out": "there.yaml"}, "--out there.yaml exists: name another file"),
            ({"--out": "no/such/my.yaml"}, "there is no folder no/such: make it first"),
            ({"--out": "/proc/my.yaml"}, "--out /proc/my.yaml cannot be written"),
            ({"--from": "gone.jsonl"}, "--from gone.jsonl does not exist"),
            ({"--from": "notes.txt"}, "--from notes.txt ends in .txt: give a .jsonl file"),
            (
                {"--from": "nothing"},
                "holds neither a saved Hugging Face data set nor",
            ),
            ({"--from": "empty.jsonl"}, "--from empty.jsonl holds no row"),
            ({"--from": "broken.jsonl"}, "line 2: not JSON"),
            ({"--from": "list.jsonl"}, "line 1: is no object but a list"),
            ({"--from": "late.jsonl"}, "late.jsonl, line 151: 'question' must be text"),
            (
                {"--from": "two.jsonl"},
                "the prompt cannot be told from one, two: name it with --prompt COLUMN",
            ),
            (
                {"--prompt": "three"},
                "--prompt is 'three', which the data does not have; it has",
            ),
            ({"--answer": "three"}, "--answer is 'three', which the data does not have"),
            ({"--from": "long.jsonl"}, "the shortest prompt has"),
            (
                {"--from": "mixed.jsonl"},
                "mixed.jsonl, line 2: has no 'prompt', the prompt of other rows; it has question, "
                "answer: give all rows the same columns, or name",
            ),
            ({"--from": "answers.jsonl"}, "prompt cannot be told from answer: name it with"),
            (
                {"--from": "answered.jsonl"},
                "answered.jsonl, line 2: has no 'answer', the expected answer of other rows, but "
                "'solution'",
            ),
            ({"--reward": "gone.py:f"}, "gone.py cannot be read (No such file or directory)"),
            ({"--reward": "rewards.py:g"}, "rewards.py has no function 'g'; it has f"),
            ({"--reward": "broken.py:f"}, "broken.py is no Python"),
            ({"--reward": "ftp://host/x"}, "--reward ftp://host/x: "),
            ({"--reward": "http://me:secret@host/x"}, "user or password"),
            ({"--reward": "nonsense"}, "give FILE.py:FUNCTION, grpc://host:port"),
            (
                {"--reward": "arithmetic", "--from": "plain.jsonl"},
                "name it with --answer COLUMN",
            ),
            ({"--model": "gone"}, "--model gone is no folder"),
            ({"--model": "part"}, "--model 'part' has neither model.safetensors nor"),
            ({"--model": "."}, "--model . has no config.json"),
            ({"--model": None}, "--model is missing"),
            ({"--tiny": ""}, "leave --model out, or --tiny"),
        ],
    ),
)
def test_bad_input_is_one_clear_message_and_nothing_is_written(
    changes: dict[str, str | None], message: str, folder: Path, model: Path
) -> None:
    (folder / "there.yaml").write_text("mine")
    (folder / "notes.txt").write_text("hello")
    (folder / "nothing").mkdir()
    (folder / "part").mkdir()
    (folder / "part" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "empty.jsonl").write_text("\n")
    (folder / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt\n')
    (folder / "broken.py").write_text("def f(:\n")
    write_lines(folder / "list.jsonl", [["a"]])
    write_lines(folder / "late.jsonl", [*ROWS * 5, {"question": 7, "solution": 8, "level": 1}])
    write_lines(folder / "two.jsonl", [{"one": "a", "two": "b"}])
    write_lines(folder / "plain.jsonl", [{"prompt": "a"}])
    write_lines(folder / "long.jsonl", [{"prompt": "1 " * 4000}])
    mixed = [{"prompt": "a", "answer": "b"}, {"question": "c", "answer": "d"}]
    write_lines(folder / "mixed.jsonl", mixed)
    write_lines(folder / "answers.jsonl", [{"answer": "b"}])
    answered = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "solution": "d"}]
    write_lines(folder / "answered.jsonl", answered)
    options = {
        "--from": "my.jsonl",
        "--reward": "rewards.py:f",
        "--model": str(model),
        "--out": "new.yaml",
        **changes,
    }
    words = [word for option in options.items() for word in option if option[1] is not None]
    ended = CliRunner().invoke(app, ["init", *(word for word in words if word)])
    assert ended.exit_code == 2
    assert message in ended.output
    assert "secret" not in ended.output
    assert len(ended.output.splitlines()) == 1
    assert ended.output.startswith("error: ")
    assert not (folder / "new.yaml").exists()
    assert (folder / "there.yaml").read_text() == "mine"


def test_an_installation_that_is_broken_is_sent_to_the_doctor(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "broken").mkdir()
    (folder / "broken" / "transformers.py").write_text("raise ImportError('first\\nsecond')\n")
    # Of a process that starts cold: a warm one has the package already.
    places = [one for one in os.environ["PYTHONPATH"].split(os.pathsep) if Path(one).name != "warm"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "broken"), *places]))
    words = ["init", "--from", "my.jsonl", "--reward", "rewards.py:f", "--tiny"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 2
    assert "run `rolemesh doctor`, which names what is wrong with an installation" in ended.output
