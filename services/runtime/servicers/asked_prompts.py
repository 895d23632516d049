"""Prompts of a generation: positions in the service's data, or prompts that the caller gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rolemesh.engine.data.prompts import Prompt, PromptRow, PromptSet, Split
from rolemesh.rpc.errors import InvalidRequestError
from rolemesh.rpc.limits import MAX_ROWS
from rolemesh.services.runtime.servicers.prompt_slices import check_slice
from rolemesh.v1 import rollout_pb2

_SPLITS: dict[int, Split] = {
    rollout_pb2.SPLIT_TRAIN: "train",
    rollout_pb2.SPLIT_HELD_OUT: "held_out",
}

_NO_METADATA = "{}"


@dataclass(frozen=True, slots=True)
class AskedPrompts:
    """Prompts of one generation."""

    count: int
    """How many they are, before samples are counted."""
    of: Callable[[PromptSet, Any], tuple[Sequence[Prompt], Sequence[int]]]
    """Makes of data and tokenizer the prompts, and the ids of those that stand in the batch before
    them."""


def asked_prompts(request: rollout_pb2.GenerateRequest, samples_per_prompt: int) -> AskedPrompts:
    """What a request asks to complete, checked as far as it can be without data.

    Raises:
        InvalidRequestError: SPLIT_INVALID, SLICE_INVALID or PROMPT_INVALID.
    """
    if request.WhichOneof("input") == "given":
        _check_given(request.given.prompts, samples_per_prompt)
        return AskedPrompts(len(request.given.prompts), partial(_given, request.given.prompts))
    if request.prompts.split not in _SPLITS:
        raise InvalidRequestError(
            "prompts.split is not set: give SPLIT_TRAIN or SPLIT_HELD_OUT",
            reason="SPLIT_INVALID",
        )
    check_slice(request.prompts, "prompts", samples_per_prompt)
    return AskedPrompts(request.prompts.count, partial(_positions, request.prompts))


def _positions(
    asked: rollout_pb2.PromptSlice, prompts: PromptSet, tokenizer: Any
) -> tuple[Sequence[Prompt], Sequence[int]]:
    split = _SPLITS[asked.split]
    earlier: list[int] = []
    if asked.HasField("batch_start") and asked.batch_start < asked.start:
        before = prompts.rows(split, asked.batch_start, asked.start - asked.batch_start)
        earlier = [prompt_id for prompt_id, _ in before]
    return prompts.slice(split, asked.start, asked.count), earlier


def _given(
    given: Sequence[rollout_pb2.GivenPrompt], prompts: PromptSet, tokenizer: Any
) -> tuple[Sequence[Prompt], Sequence[int]]:
    return [
        _rendered(f"given.prompts[{place}]", one, prompts, tokenizer)
        for place, one in enumerate(given)
    ], ()


def _check_given(prompts: Sequence[rollout_pb2.GivenPrompt], samples_per_prompt: int) -> None:
    if not 1 <= len(prompts) * samples_per_prompt <= MAX_ROWS:
        raise InvalidRequestError(
            f"given.prompts are {len(prompts)}, with {samples_per_prompt} samples each: give one "
            f"or more, and ask for {MAX_ROWS} trajectories at most in one call",
            reason="SLICE_INVALID",
        )
    for place, given in enumerate(prompts):
        if bool(given.tokens) == bool(given.text):
            raise _invalid(f"given.prompts[{place}]", "give either tokens or text")
        if given.prompt_id < 0:
            raise _invalid(f"given.prompts[{place}]", f"prompt_id is {given.prompt_id}: give >= 0")


def _rendered(
    where: str, given: rollout_pb2.GivenPrompt, prompts: PromptSet, tokenizer: Any
) -> Prompt:
    if given.text:
        row = PromptRow(
            messages=({"role": "user", "content": given.text},),
            answer=given.answer,
            metadata=given.metadata_json or _NO_METADATA,
            where=where,
        )
        return prompts.render(given.prompt_id, row)
    # An id beyond the embedding would end the whole process on a GPU.
    unknown = [token for token in given.tokens if not 0 <= token < len(tokenizer)]
    if unknown:
        raise _invalid(
            where, f"token {unknown[0]} is none of the model's: give 0 to {len(tokenizer) - 1}"
        )
    return Prompt(
        prompt_id=given.prompt_id,
        text=tokenizer.decode(given.tokens),
        tokens=list(given.tokens),
        answer=given.answer,
        metadata=given.metadata_json or _NO_METADATA,
    )


def _invalid(where: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: {problem}", reason="PROMPT_INVALID")
