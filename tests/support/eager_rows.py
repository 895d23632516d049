"""The rows of a data section as they were once loaded: all at once, one after the other.

Every row is rendered and encoded by itself, and stays in memory. What loads rows otherwise has to
give the same ones in the same order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
from msgspec.structs import replace

from rolemesh.engine.data.orders.by_seed import Epochs, Mixture
from rolemesh.engine.data.rendering.rendering import Renderer
from rolemesh.engine.data.rows import PromptRow, RowReader


class EagerRows:
    """Training and held-out rows of a section of files, and the training rows' order."""

    def __init__(self, spec: Any, tokenizer: Any, seed: int) -> None:
        self._renderer = Renderer(tokenizer)
        self._spec = spec
        mixed = spec.sources if spec.type == "mixture" else None
        sources = [one.data for one in mixed] if mixed else [spec]
        loaded = [_loaded(source) for source in sources]
        apart = {row.identity for _, held_out in loaded for row in held_out}
        if mixed:
            loaded = [
                ([row for row in train if row.identity not in apart], held_out)
                for train, held_out in loaded
            ]
        kept = [
            (self._short(train, source), self._short(held_out, source))
            for (train, held_out), source in zip(loaded, sources, strict=True)
        ]
        self.train = [row for train, _ in kept for row in train]
        self.held_out = [row for _, held_out in kept for row in held_out]
        orders = []
        for number, ((train, _), source) in enumerate(zip(kept, sources, strict=True)):
            own_seed = f"{seed}/source {number}" if len(sources) > 1 else str(seed)
            orders.append(Epochs(len(train), _order(source.curriculum, train, own_seed)))
        self._order: Any = orders[0]
        if mixed and len(mixed) > 1:
            weights = [one.weight for one in mixed]
            self._order = Mixture(orders, [len(train) for train, _ in kept], weights, seed)

    def first(self, count: int) -> list[tuple[int, PromptRow]]:
        """Index and row at the positions 0 to count - 1 of the training split."""
        return [(index, self.train[index]) for index in self._order.rows(0, count)]

    def _short(self, rows: Sequence[PromptRow], source: Any) -> list[PromptRow]:
        most_prompt = _least(source.max_prompt_tokens, self._spec.max_prompt_tokens)
        most_row = _least(source.max_row_tokens, self._spec.max_row_tokens)
        kept = []
        for row in rows:
            if row.text is not None:
                kept.append(replace(row, max_text_tokens=most_row))
                continue
            prompt = len(self._renderer.tokens(self._renderer.prompt_text(row)))
            given = [one for one in (row.completion, row.chosen, row.rejected) if one is not None]
            lengths = [len(self._renderer.completion(row, one).tokens) for one in given]
            if (most_prompt is None or prompt <= most_prompt) and (
                most_row is None or prompt + max(lengths, default=0) <= most_row
            ):
                kept.append(row)
        return kept


def _loaded(source: Any) -> tuple[list[PromptRow], list[PromptRow]]:
    train = _rows(source, source.path)
    if source.held_out_path is not None:
        return train, _rows(source, source.held_out_path)
    order = list(range(len(train)))
    random.Random(f"{source.seed}/held_out").shuffle(order)
    drawn: dict[str, int] = {}
    for at in order:
        if len(drawn) < source.held_out_size:
            drawn.setdefault(train[at].identity, at)
    rest = [row for row in train if row.identity not in drawn]
    return rest, [train[at] for at in sorted(drawn.values())]


def _rows(source: Any, path: Path) -> list[PromptRow]:
    if source.type == "jsonl":
        records = [json.loads(line) for line in path.read_text().split("\n") if line]
        places = [f"line {number}" for number in range(1, len(records) + 1)]
    else:
        records = pyarrow.parquet.read_table(path).to_pylist()
        places = [f"row {number} (counted from 0)" for number in range(len(records))]
    field = "held_out_path" if path == source.held_out_path else "path"
    reader = RowReader(source, "data")
    return [
        reader.read(record, f"{field} {path}, {place}")
        for record, place in zip(records, places, strict=True)
    ]


def _order(curriculum: Any, rows: Sequence[PromptRow], seed: str) -> Any:
    def order(epoch: int) -> list[int]:
        numbers = list(range(len(rows)))
        random.Random(f"{seed}/{epoch}").shuffle(numbers)
        if curriculum is None:
            return numbers
        values = [json.loads(row.metadata)[curriculum.by] for row in rows]
        return sorted(numbers, key=values.__getitem__, reverse=not curriculum.ascending)

    return order


def _least(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)
