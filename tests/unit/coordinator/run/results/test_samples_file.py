"""samples.jsonl: what a run writes, what is left of it, and how people look at it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolemesh.coordinator.commands.cli import app
from rolemesh.coordinator.run.results.samples_file import SAMPLES_FILE, SamplesFile, read_samples
from rolemesh.rpc.samples.sessions import session_message
from rolemesh.v1 import coordinator_pb2


def sample(row: int, reward: float, text: str = "4") -> coordinator_pb2.Sample:
    return coordinator_pb2.Sample(
        row=row,
        prompt="2 + 2 =",
        completion=text,
        answer="4",
        reward=reward,
        token_ids=[7, 8],
        reward_parts={"python/acc": 0.5} if row else {},
    )


def of_session(row: int, branch: int, log: str = "") -> coordinator_pb2.Sample:
    """One of two branches: call 0 is in both, call 3 in none."""
    one = sample(row, 1.0)
    use = coordinator_pb2.CALL_USE_SHARED if branch else coordinator_pb2.CALL_USE_TRAINED
    calls = [
        coordinator_pb2.SampledCall(number=0, num_sampled_tokens=4, use=use),
        coordinator_pb2.SampledCall(
            number=1 + branch, num_sampled_tokens=2, use=coordinator_pb2.CALL_USE_TRAINED
        ),
    ]
    judge = coordinator_pb2.SampledCall(
        number=3, num_sampled_tokens=5, use=coordinator_pb2.CALL_USE_UNTRAINED
    )
    one.session.CopyFrom(
        coordinator_pb2.SampledSession(
            prompt_id=7,
            sample_index=1,
            branch=branch,
            num_branches=2,
            attempts=2,
            calls=calls,
            left_out=[] if branch else [judge],
            log=log,
        )
    )
    return one


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run of three steps, evaluated before and after."""
    (tmp_path / "metrics.jsonl").write_text("")
    file = SamplesFile(tmp_path)
    file.write(0, [sample(0, 0.0, "[red]no")], is_held_out=True)
    for step in (1, 2, 3):
        file.write(step, [sample(0, step / 10), sample(5, -step)], is_held_out=False)
    file.write(3, [sample(0, 1.0)], is_held_out=True)
    file.close()
    return tmp_path


def test_a_run_that_goes_back_takes_its_samples_with_it(folder: Path) -> None:
    file = SamplesFile(folder)
    file.rewind(1)
    assert [(one.step, one.held_out, one.row) for one in read_samples(folder)] == [
        (0, True, 0),
        (1, False, 0),
        (1, False, 5),
    ]
    file.write(2, [sample(0, 0.75)], is_held_out=False)
    file.close()
    assert read_samples(folder)[-1].reward == 0.75


def test_an_evaluation_that_is_made_again_stands_once_and_a_missing_reward_is_none(
    folder: Path,
) -> None:
    file = SamplesFile(folder)
    file.write(3, [sample(0, math.nan)], is_held_out=True)
    file.close()
    with (folder / SAMPLES_FILE).open("a") as torn:
        torn.write('{"step": 4, "held')
    (again,) = [one for one in read_samples(folder) if one.held_out and one.step == 3]
    assert again.reward is None
    assert len(read_samples(folder)) == 8


def test_the_oldest_lines_go_where_the_file_is_full(tmp_path: Path) -> None:
    limit = 20_000
    file = SamplesFile(tmp_path, max_bytes=limit)
    for step in range(1, 400):
        file.write(step, [sample(0, 0.0), sample(1, 1.0)], is_held_out=False)
        assert (tmp_path / SAMPLES_FILE).stat().st_size <= limit
    file.close()
    steps = [one.step for one in read_samples(tmp_path)]
    assert steps[-1] == 399
    assert steps == sorted(steps)
    assert len(steps) > 20


def rolemesh_samples(*arguments: str) -> tuple[int, list[dict[str, object]], str]:
    done = CliRunner().invoke(app, ["samples", *arguments, "--json"])
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return done.exit_code, [line for line in lines if line["type"] == "sample"], done.output


def test_samples_are_chosen_by_step_and_by_reward(folder: Path) -> None:
    def chosen(*arguments: str) -> list[tuple[object, object]]:
        code, lines, _ = rolemesh_samples(str(folder), *arguments)
        assert code == 0
        return [(line["step"], line["reward"]) for line in lines]

    assert chosen() == [(3, 0.3), (3, -3.0), (3, 1.0)]
    assert chosen("--step", "2") == [(2, 0.2), (2, -2.0)]
    assert chosen("--best", "-n", "2") == [(3, 1.0), (3, 0.3)]
    assert chosen("--worst", "-n", "1") == [(3, -3.0)]
    assert chosen("--step", "1", "--worst", "-n", "1") == [(1, -1.0)]
    assert chosen("--held-out", "--worst") == [(0, 0.0), (3, 1.0)]


def test_text_of_a_model_is_shown_as_it_is(folder: Path) -> None:
    done = CliRunner().invoke(app, ["samples", str(folder), "--step", "0"])
    assert done.exit_code == 0
    assert "held out, after step 0, row 0: reward 0.000, 2 tokens" in done.output
    assert "[red]no" in done.output
    assert "expected: 4" in done.output
    done = CliRunner().invoke(app, ["samples", str(folder), "--step", "1"])
    assert "step 1, row 5: reward -1.000 (python/acc 0.5), 2 tokens" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "9"], "has samples of 4 steps, 0 to 3"),
        (["--best", "--worst"], "give one of them"),
    ],
)
def test_what_is_not_there_is_said(folder: Path, arguments: list[str], message: str) -> None:
    code, _, output = rolemesh_samples(str(folder), *arguments)
    assert code == 2
    assert message in output.replace("\n", " ")


def test_a_folder_without_samples_and_a_changed_file_are_refused(tmp_path: Path) -> None:
    code, _, output = rolemesh_samples(str(tmp_path))
    assert code == 2
    assert "holds no run" in output
    (tmp_path / "metrics.jsonl").write_text("")
    code, _, output = rolemesh_samples(str(tmp_path))
    assert code == 2
    assert "run.samples above 0" in output
    (tmp_path / SAMPLES_FILE).write_text('{"step": 1}\n')
    code, _, output = rolemesh_samples(str(tmp_path))
    assert code == 2
    assert "line 1 of" in output


def test_sessions_of_agents_outlive_the_store_and_are_shown(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    file = SamplesFile(tmp_path)
    written = [
        of_session(0, 0, "looked it up\n\x1b[2J[red]found\n"),
        of_session(1, 1),
        sample(2, 0.0),
    ]
    file.write(1, written, is_held_out=False)
    file.close()
    kept = read_samples(tmp_path)
    assert [one.session and session_message(one.session) for one in kept] == [
        written[0].session,
        written[1].session,
        None,
    ]
    done = CliRunner().invoke(app, ["samples", str(tmp_path)])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert "session of prompt 7, sample 1: branch 1 of 2, attempt 2" in lines
    assert "  call 0: 4 tokens, trained" in lines
    assert "  call 3: 5 tokens, in no row, kept out of training" in lines
    assert "  call 0: 4 tokens, shared with an earlier row" in lines
    at = lines.index("its agent wrote:")
    # Text of an agent is never markup, and moves no cursor.
    assert lines[at + 1 : at + 3] == ["looked it up", "\ufffd[2J[red]found"]
    assert done.output.count("session of") == 2


def test_lines_of_an_earlier_version_are_read_and_changed_sessions_are_refused(
    tmp_path: Path,
) -> None:
    file = SamplesFile(tmp_path)
    file.write(1, [of_session(0, 0)], is_held_out=False)
    file.close()
    path = tmp_path / SAMPLES_FILE
    line = json.loads(path.read_text())
    without = {name: value for name, value in line.items() if name != "session"}
    path.write_text(json.dumps(without) + "\n")
    assert [one.session for one in read_samples(tmp_path)] == [None]
    for session in ({**line["session"], "log": 7}, {}, [], "so long"):
        path.write_text(json.dumps({**line, "session": session}) + "\n")
        with pytest.raises(ValueError, match=r"line 1 of .* is no sample"):
            read_samples(tmp_path)


def test_a_file_names_the_images_of_a_prompt_and_has_no_word_of_them_elsewhere(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    shown = sample(0, 1.0)
    shown.images.add(sha256="ab" * 32, num_bytes=3000, url="data:image/png;base64,AA==")
    file = SamplesFile(tmp_path)
    file.write(1, [shown, sample(1, 0.0)], is_held_out=False)
    file.close()
    first, second = (tmp_path / SAMPLES_FILE).read_text().splitlines()
    assert json.loads(first)["images"] == [{"sha256": "ab" * 32, "num_bytes": 3000}]
    assert "images" not in second
    read, _ = read_samples(tmp_path)
    assert [(one.sha256, one.url) for one in read.images_message()] == [("ab" * 32, "")]
    done = CliRunner().invoke(app, ["samples", str(tmp_path)])
    assert "image abababababab, 3000 bytes" in done.output
    (tmp_path / SAMPLES_FILE).write_text(first.replace("num_bytes", "bytes") + "\n")
    with pytest.raises(ValueError, match=r"line 1 of .* is no sample"):
        read_samples(tmp_path)
