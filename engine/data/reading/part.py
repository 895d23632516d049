"""Reads a part of a file of JSON lines: python -m rolemesh.engine.data.reading.part.

The first line of the input is a `PartSpec` in JSON; where the input ends, so does this. Exit code
0: the rows and their facts are in files; FAULTY_DATA: the data has a fault, which whoever started
this finds by reading the file itself.
"""

from __future__ import annotations

import os
import sys
import threading

from rolemesh.engine.data.files import jsonl
from rolemesh.engine.data.reading.filtering import Bounds
from rolemesh.engine.data.reading.index import hash_of_tokenizer
from rolemesh.engine.data.reading.parts import FAULTY_DATA, PartSpec, fact_file
from rolemesh.engine.data.rendering.rendering import Renderer
from rolemesh.engine.data.rendering.tokenizers import load_light_tokenizer
from rolemesh.engine.data.row_store import RowStore
from rolemesh.engine.data.rows import DataInvalidError, RowReader
from rolemesh.engine.data.sources import Intake


def main() -> int:
    """Reads the spec and the part."""
    part = PartSpec.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    tokenizer = load_light_tokenizer(part.model)
    if hash_of_tokenizer(tokenizer) != part.tokenizer:
        print(f"{part.model} holds another tokenizer than the one in use", file=sys.stderr)
        return 1
    bounds = Bounds(
        Renderer(tokenizer),
        max_prompt_tokens=part.max_prompt_tokens,
        max_row_tokens=part.max_row_tokens,
        measured_from=part.measured_from,
    )
    lines = jsonl.Lines(start=part.start, end=part.end, first=part.first_line)
    reader = RowReader(part.spec, part.field)
    with part.out.open("x+b") as file:
        store = RowStore(file)
        intake = Intake(
            store=store,
            with_identities=part.with_identities,
            max_row_tokens=part.max_row_tokens,
            measure=bounds,
        )
        records = jsonl.records(part.path, part.path_field, lines)
        try:
            intake.take(reader.read(record, where) for record, where in records)
        except DataInvalidError:
            return FAULTY_DATA
    for name, values in store.facts().items():
        fact_file(part.out, name).write_bytes(values.tobytes())
    return 0


def _end_with_input() -> None:
    # By its number: at the end of the program the other object must not be in use.
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
