"""Prompts from reasoning-gym: procedural tasks whose answers can be verified."""

from __future__ import annotations

import json
from typing import Any

from rolemesh.engine.data.rows import Message, PromptRow
from rolemesh.engine.reasoning_tasks import check_task, reasoning_gym
from rolemesh.engine.specs import ReasoningGymSpec

_MAX_DRAWS_PER_ROW = 50
"""Most draws for one distinct row; after that the task counts as too small for the split."""


def load(spec: ReasoningGymSpec) -> tuple[list[PromptRow], list[PromptRow]]:
    """Draws the held-out rows, all distinct, and then training rows that differ from them.

    Training rows may repeat if the task's generator repeats them.

    Raises:
        ValueError: There is no such task, a package that it needs is not installed, it refuses the
            config, or it has too few distinct rows.
    """
    library = reasoning_gym()
    if spec.task not in library.factory.DATASETS:
        raise ValueError(
            f"data.task is {spec.task!r}, which reasoning-gym does not have; it has, among "
            f"others, {', '.join(sorted(library.factory.DATASETS)[:12])}"
        )
    check_task(spec.task)
    num_draws = _MAX_DRAWS_PER_ROW * (spec.train_size + spec.held_out_size)
    try:
        entries = library.create_dataset(
            spec.task, seed=spec.seed, size=max(1, num_draws), **spec.config
        )
    except (TypeError, AssertionError) as error:
        raise ValueError(f"data.config does not fit task {spec.task!r}: {error}") from error
    # Rows are compared as the policy sees them: a template may leave out their difference.
    held_out: dict[str, PromptRow] = {}
    train: list[PromptRow] = []
    for index in range(num_draws):
        row = _row(entries[index], spec, f"task {spec.task!r}, draw {index}")
        identity = row.messages[-1]["content"] + row.assistant_prefix
        if len(held_out) < spec.held_out_size:
            held_out.setdefault(identity, row)
        elif len(train) == spec.train_size:
            break
        elif identity not in held_out:
            train.append(row)
    if len(held_out) < spec.held_out_size or len(train) < spec.train_size:
        raise ValueError(
            f"task {spec.task!r} gave {len(held_out)} distinct held-out and {len(train)} training "
            f"prompts in {num_draws} draws, of {spec.held_out_size} and {spec.train_size} wanted: "
            "lower data.held_out_size or widen data.config"
        )
    return train, list(held_out.values())


def _row(entry: dict[str, Any], spec: ReasoningGymSpec, where: str) -> PromptRow:
    fields = {**entry["metadata"], "question": entry["question"]}
    messages: list[Message] = []
    if spec.system_prompt is not None:
        messages.append({"role": "system", "content": spec.system_prompt})
    content = _filled("question_template", spec.question_template, fields)
    messages.append({"role": "user", "content": content})
    return PromptRow(
        messages=messages,
        assistant_prefix=_filled("assistant_prefix", spec.assistant_prefix, fields),
        answer=entry["answer"],
        metadata=json.dumps(
            {"question": entry["question"], "metadata": entry["metadata"]}, default=str
        ),
        where=where,
    )


def _filled(name: str, template: str, fields: dict[str, Any]) -> str:
    try:
        return template.format_map(fields)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"data.{name} {template!r} cannot be filled ({error!r}): "
            f"the task's fields are {', '.join(sorted(fields))}"
        ) from error
