"""Writes what a teacher answers to sums, for SFT on it: distillation of whole sequences.

The teacher only writes text, so it may have any vocabulary (arXiv 1606.07947)::

    python -m rolemesh.quickstart.teacher_answers --teacher runs/teacher/model --out .data/teacher
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolemesh.quickstart.sum_examples import demonstration

FILE = "demonstrations.jsonl"

SYSTEM_PROMPT = "Answer with only the number."
"""That of the quickstart's recipe."""
MAX_TOKENS = 8
BATCH = 64


def conversation(prompt: str) -> list[dict[str, str]]:
    """The sum as the quickstart asks it: the answer's turn begins with the sum."""
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": prompt.removesuffix(" ?")},
    ]


def answered(teacher: Path, prompts: Sequence[str]) -> list[str]:
    """The teacher's greedy answer to each sum, without blanks around it."""
    # Takes seconds, and the help of this command needs none of it.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(
        teacher, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(
        teacher, padding_side="left", local_files_only=True, trust_remote_code=False
    )
    texts: list[str] = []
    for first in range(0, len(prompts), BATCH):
        asked = tokenizer.apply_chat_template(
            [conversation(prompt) for prompt in prompts[first : first + BATCH]],
            continue_final_message=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        found = model.generate(**asked, max_new_tokens=MAX_TOKENS, do_sample=False)
        answers = found[:, asked["input_ids"].shape[1] :]
        texts += [
            text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)
        ]
    return texts


def main(arguments: Sequence[str]) -> int:
    """Writes the file that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m rolemesh.quickstart.teacher_answers",
        description=(__doc__ or "").split(":")[0],
    )
    parser.add_argument("--teacher", type=Path, required=True, metavar="DIR", help="model folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--rows", type=int, default=2048, help="rows of the file (2048)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (0)")
    given = parser.parse_args(arguments)
    if given.rows < 1:
        parser.error(f"--rows is {given.rows}: give at least 1")
    if not (given.teacher / "config.json").is_file():
        parser.error(f"--teacher is {str(given.teacher)!r}, which is no model folder")
    draw = random.Random(f"{FILE} {given.seed}")
    prompts = [str(demonstration(draw)["prompt"]) for _ in range(given.rows)]
    # What the teacher left empty is no answer to learn from.
    rows = [
        {"prompt": prompt, "completion": text}
        for prompt, text in zip(prompts, answered(given.teacher, prompts), strict=True)
        if text
    ]
    given.out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows]
    (given.out / FILE).write_text("".join(lines), encoding="utf-8")
    print(f"{given.out / FILE}: {len(rows)} rows of {given.rows}, as {given.teacher} answers")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
