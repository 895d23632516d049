"""Whether two model folders mean the same by a token id, as their tokenizers' files tell.

No torch, and no tokenizer is made: of the file the table of tokens is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rolemesh.engine.model_folders.model_files import ModelFolderError

TOKENIZER_FILE = "tokenizer.json"

_REMEDY = (
    "give a teacher of the policy's vocabulary, or have it write completions and train on them "
    "with algorithm 'sft'"
)


def check_same_vocabulary(
    policy: Path, teacher: Path, *, field: str = "teacher.model.path"
) -> None:
    """Refuses a teacher whose token ids mean something else than the policy's.

    Args:
        policy: Model folder of the policy.
        teacher: Model folder of the teacher.
        field: What named it, for the error.

    Raises:
        ModelFolderError: A folder has no tokenizer.json, or the tables differ; names the first
            token id that does.
    """
    if policy == teacher:
        return
    known, told = (_tokens(folder, field, str(teacher)) for folder in (policy, teacher))
    differing = sorted(
        number for number in known.keys() | told.keys() if known.get(number) != told.get(number)
    )
    if differing:
        number = differing[0]
        mine, its = (
            "none" if number not in table else repr(table[number]) for table in (known, told)
        )
        raise ModelFolderError(
            f"{field} is {str(teacher)!r}, whose vocabulary is not the policy's: of {len(known)} "
            f"and {len(told)} tokens {len(differing)} differ, the first is {number}, here {mine} "
            f"and there {its}: {_REMEDY}"
        )


def _tokens(folder: Path, field: str, teacher: str) -> dict[int, str]:
    """Each token by its id."""
    path = folder / TOKENIZER_FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        model = content.get("model", {})
        vocab = model.get("vocab", {})
        pairs = (
            ((number, token) for token, number in vocab.items())
            if isinstance(vocab, dict)
            # Unigram's are [token, score], in the order of their ids.
            else enumerate(token for token, _ in vocab)
        )
        added = ((one["id"], one["content"]) for one in content.get("added_tokens", ()))
        return {**dict(pairs), **dict(added)}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelFolderError(
            f"{field} is {teacher!r}: whether it has the policy's vocabulary cannot be told from "
            f"{str(path)!r} ({error or type(error).__name__}): put the {TOKENIZER_FILE} of the "
            "model there, or check that each token id means the same to both and give the teacher "
            "the policy's file"
        ) from error
