"""Messages of other libraries reach the user whole, on one line and within bounds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rolemesh.engine.messages import MOST_CHARACTERS, on_one_line, said_last


def test_all_lines_are_kept_and_a_long_message_is_cut() -> None:
    assert on_one_line("one of: \n(1) file,\n\n  (2) class.") == "one of: (1) file, (2) class."
    cut = on_one_line("word\n" * 1000)
    assert len(cut) == MOST_CHARACTERS
    assert cut.endswith("wo...")
    assert on_one_line("NCCL error\nLast error: none left\nException raised from f (frame #0)") == (
        "NCCL error Last error: none left"
    )


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "raise ValueError('one of:\\n(1) a file\\n    (2) a class')",
            "ValueError: one of: (1) a ",
        ),
        ("raise SystemExit('error: no\\nsuch file')", "error: no such file"),
        (
            "import sys; sys.stderr.write('a warning\\nno such option\\n'); sys.exit(2)",
            "no such op",
        ),
        ("raise SystemExit(2)", ""),
    ],
    ids=["exception", "error", "last line", "nothing"],
)
def test_what_a_process_said_last_is_whole(code: str, said: str) -> None:
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode
    told = said_last(ended.stderr)
    assert told.startswith(said)
    assert bool(told) == bool(said)
