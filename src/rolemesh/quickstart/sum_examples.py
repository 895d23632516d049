"""Writes examples of sums: demonstrations, pairs and judgements, for recipes that learn from data.

Wanted is the right number and nothing else. Not wanted are wrong numbers and words::

    python -m rolemesh.quickstart.sum_examples --out .data/sums
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rolemesh.quickstart.form_examples import KINDS, NUMBER_KINDS, Kind, completion

Row = Mapping[str, str | bool]

LARGEST_TERM = 99
WRONG_NUMBERS = 0.5
"""Share of bare wrong numbers among the unwanted completions; the others have the wrong form."""
_WRONG_FORMS: tuple[Kind, ...] = tuple(
    kind for kind in KINDS if kind not in NUMBER_KINDS and kind != "empty"
)


def demonstration(draw: random.Random) -> Row:
    """A sum and its answer."""
    prompt, answer = _sum(draw)
    return {"prompt": prompt, "completion": answer, "answer": answer}


def preference(draw: random.Random) -> Row:
    """A sum, its answer, and something worse."""
    prompt, answer = _sum(draw)
    return {
        "prompt": prompt,
        "chosen": answer,
        "rejected": _unwanted(draw, answer),
        "answer": answer,
    }


def judgement(draw: random.Random) -> Row:
    """A sum with its answer, or with something worse; the label says which."""
    prompt, answer = _sum(draw)
    is_wanted = draw.random() < 0.5
    given = answer if is_wanted else _unwanted(draw, answer)
    return {"prompt": prompt, "completion": given, "label": is_wanted, "answer": answer}


FILES: Mapping[str, Callable[[random.Random], Row]] = {
    "demonstrations.jsonl": demonstration,
    "preferences.jsonl": preference,
    "judgements.jsonl": judgement,
}
"""The function that makes the rows of each file."""


def write_examples(directory: Path, *, num_rows: int, seed: int) -> None:
    """Writes FILES; the same arguments write the same bytes.

    Args:
        directory: Target folder, made if it is missing.
        num_rows: Number of rows of each file.
        seed: Seed of all draws.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name, make in FILES.items():
        draw = random.Random(f"{name} {seed}")
        lines = [json.dumps(make(draw)) + "\n" for _ in range(num_rows)]
        (directory / name).write_text("".join(lines), encoding="utf-8")


def _sum(draw: random.Random) -> tuple[str, str]:
    left, right = draw.randint(1, LARGEST_TERM), draw.randint(1, LARGEST_TERM)
    return f"{left} + {right} = ?", str(left + right)


def _unwanted(draw: random.Random, answer: str) -> str:
    if draw.random() < WRONG_NUMBERS:
        slips = [slip for slip in (-10, -2, -1, 1, 2, 10) if int(answer) + slip > 0]
        return str(int(answer) + draw.choice(slips))
    while True:
        text = completion(draw.choice(_WRONG_FORMS), draw, held_out=False).strip()
        if text and text != answer:
            return text


def main(arguments: Sequence[str]) -> int:
    """Writes the files that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m rolemesh.quickstart.sum_examples",
        description=(__doc__ or "").split(":")[0],
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--rows", type=int, default=2048, help="rows of each file (2048)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    given = parser.parse_args(arguments)
    if given.rows < 1:
        parser.error(f"--rows is {given.rows}: give at least 1")
    write_examples(given.out, num_rows=given.rows, seed=given.seed)
    print(f"{given.out}: {given.rows} rows each in {', '.join(FILES)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
