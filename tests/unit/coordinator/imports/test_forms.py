"""Files, overrides and scripts of other systems, read as flat settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolemesh.coordinator.imports.forms.hydra import interpolated, overridden
from rolemesh.coordinator.imports.forms.reading import read_trl, read_verl
from rolemesh.coordinator.imports.forms.shell import arithmetic, words_of
from rolemesh.coordinator.imports.recipe import imported
from rolemesh.coordinator.imports.source import ImportedError, Source, Unresolved
from rolemesh.coordinator.recipe.loading import read_recipe

SCRIPT = r"""#!/bin/bash
set -x
base=16   # prompts
batch=$((base * 4))
NODES=${NODES:-2}
name="a-${base}"
stamp=$(date +%s)
if [ "$1" = big ]; then
    base=1024
fi
COMMON=(
    trainer.nnodes=$NODES
    # trainer.device=npu
    trainer.experiment_name="$name"
)
ARGS="a.b=1 c.d=2"

python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer.yaml' \
    data.train_batch_size=${batch} \
    data.train_files="['$HOME/a.parquet']" \
    trainer.project_name=$stamp \
    trainer.default_local_dir=${OUTSIDE}/runs \
    'quoted.value=$base' \
    $ARGS "${COMMON[@]}" $@ 2>&1 | tee log.txt
"""


def test_a_script_is_read_as_a_shell_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    words, remarks = words_of(SCRIPT, "main_ppo")
    assert words == [
        *("--config-name=ppo_megatron_trainer.yaml", "data.train_batch_size=64"),
        *("data.train_files=['/home/me/a.parquet']", "trainer.project_name=${stamp}"),
        *("trainer.default_local_dir=${OUTSIDE}/runs", "quoted.value=$base", "a.b=1", "c.d=2"),
        *("trainer.nnodes=2", "trainer.experiment_name=a-16"),
    ]
    assert [word for word in words if isinstance(word, Unresolved)] == [
        *("trainer.project_name=${stamp}", "trainer.default_local_dir=${OUTSIDE}/runs"),
        "quoted.value=$base",
    ]
    assert remarks == ["base is also set under a condition of the script, which is not read"]


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    words, _ = words_of(
        f"x=$(touch {mark})\nmain_ppo a=$x b=`touch {mark}` c=$(touch {mark})", "main_ppo"
    )
    assert words[0] == "a=${x}"
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1024 * 2", 2048), ("(3 + 4) * 2", 14), ("10 / 3", 3), ("((128))", 128), ("2 - -1", 3)),
        *(("__import__", None), ("1 / 0", None), ("2 ** 3", None), ("", None)),
    ],
    ids=str,
)
def test_sums_of_a_shell(text: str, value: int | None) -> None:
    assert arithmetic(text) == value


def test_overrides_set_add_and_remove() -> None:
    values = overridden({"a.b": 1, "a.c": 2, "d": 3}, ["a.b=5", "+e.f={x: 1}", "~d", "++g='1e-6'"])
    assert values == {"a.b": 5, "a.c": 2, "e.f.x": 1, "g": "1e-6"}
    with pytest.raises(ImportedError, match="'nothing' is no override: give key=value"):
        overridden({}, ["nothing"])


def test_values_that_name_others() -> None:
    values = interpolated(
        {
            **{"a.b": 4, "a.c": "${a.b}", "a.d": "${.c}", "e": "${oc.select:f.g,7}"},
            **{
                "h": "${oc.env:SECRET}",
                "i": "${oc.env:SECRET,8}",
                "j": "x-${a.b}",
                "k": "${known}",
            },
            **{"l": "???", "m": "${n}", "n": "${m}"},
        },
        {"known": 9},
    )
    assert values == {
        **{"a.b": 4, "a.c": 4, "a.d": 4, "e": 7, "h": "${oc.env:SECRET}", "i": 8, "j": "x-4"},
        **{"k": 9, "l": None, "m": "${n}", "n": "${m}"},
    }
    assert isinstance(values["h"], Unresolved)
    assert isinstance(values["m"], Unresolved)


def test_a_file_with_overrides(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("data: {train_batch_size: 8, max_prompt_length: 5}\ntrainer: {nnodes: 1}\n")
    source = read_verl(config, ["data.train_batch_size=16"], {})
    assert dict(source.fields()) == {
        **{"data.max_prompt_length": 5, "trainer.nnodes": 1, "data.train_batch_size": 16}
    }


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"a": 1,}', r"a\.json:1:\d+: not valid JSON"),
        ("a.yaml", "a: [1", r"a\.yaml:\d+:\d+: not valid YAML"),
        ("a.yaml", "- 1", "a mapping of names to values, this is a list"),
        ("a.yaml", "", "this is empty"),
        ("a.yaml", "a: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("a.yaml", "a: &x [1]\nb: *x", "aliases .* are not read: write out the value"),
        ("a.json", "[" * 100_000, "not valid|cannot be read"),
        ("a.sh", "echo nothing", "no command of the script calls"),
    ],
    ids=["json", "yaml", "list", "empty", "object", "alias", "deep", "script"],
)
def test_bad_files_say_where_and_what(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ImportedError, match=message):
        read_trl(path, {})
    with pytest.raises(ImportedError, match="there is no such file"):
        read_trl(tmp_path / "absent.json", {})


def test_a_script_of_trl(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "trl grpo \\\n  --model_name_or_path me/tiny --num_generations 4 --use_vllm\n"
    )
    values = dict(read_trl(script, {}).fields())
    assert values == {"model_name_or_path": "me/tiny", "num_generations": 4, "use_vllm": True}


def test_a_script_says_which_trainer_it_calls(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("python trl/scripts/distillation.py \\\n  --model_name_or_path me/tiny\n")
    source = read_trl(script, {})
    assert source.text("trainer") == "distillation"
    # The default of DistillationConfig, not of GRPOConfig.
    assert source.number("beta") == 1.0


def test_quotes_may_span_lines() -> None:
    script = "x='a\nb'\nbash -c \"cd /x \\\n && main_ppo a=1 \\\n b='[c, d]'\" # it's\n"
    assert words_of(script, "main_ppo")[0] == ["a=1", "b=[c, d]"]


def test_what_a_value_holds_cannot_end_its_comment() -> None:
    source = Source("trl", {"mystery": "a\nrun: {seed: 3}\x85run: {seed: 4}", "b\nrun": 1})
    assert read_recipe(imported(source, "a test").text, "the import").run.seed == 42
