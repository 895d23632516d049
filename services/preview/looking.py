"""What a look at a recipe's data and rewards finds: rows, one rendered prompt, one judged row."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy
from pydantic import Field

from rolemesh.engine.data.prompts import Prompt, PromptSet, load_prompts
from rolemesh.engine.data.reading.filtering import long_prompts
from rolemesh.engine.data.rendering.rendering import ChatTokenizer
from rolemesh.engine.data.rendering.tokenizers import (
    import_light_transformers,
    load_light_tokenizer,
)
from rolemesh.engine.data.row_store import Rows
from rolemesh.engine.data.sections import Progress
from rolemesh.engine.environments.base import opening_of, raised
from rolemesh.engine.environments.factory import environment_maker
from rolemesh.engine.granted.user_code import UserCodeError
from rolemesh.engine.model_folders.pretrained import load_config, load_tokenizer
from rolemesh.engine.sandbox.host import find_sandbox
from rolemesh.engine.sessions.python_agent import RunEnvironment
from rolemesh.engine.specs import (
    AgentSpec,
    DataSpec,
    EnvironmentSpec,
    OutsideRewardSpec,
    OwnFunctionSpec,
    PythonAgentSpec,
    PythonEnvironmentSpec,
    PythonRewardSpec,
    Spec,
    TeacherRouteSpec,
    WeightedRewardSpec,
    routed_value,
)
from rolemesh.services.reward.outside.base import OutsideRewardError
from rolemesh.services.reward.outside.check.recipe_rows import rows_of_prompt
from rolemesh.services.reward.outside.make import make_outside_reward
from rolemesh.services.runtime.server.config import sandbox_mode

Given = Literal["prompt", "demonstration", "preference", "judgement", "any"]

_NEEDED: dict[Given, tuple[str, ...]] = {
    "prompt": (),
    "demonstration": ("completion",),
    "preference": ("chosen", "rejected"),
    "judgement": ("completion", "label"),
    "any": (),
}
"""Columns that every row needs, by what an algorithm reads of it."""

_FIELDS = {"label": "is_wanted"}
"""Field of PromptRow for a column that is not called like it."""


class LookedAtModel(Spec):
    """A folder of a model that a role loads."""

    field: str
    """Of the recipe that names it."""
    path: Path
    has_tokenizer: bool
    """Whether the role loads its tokenizer, too."""


class PreviewSpec(Spec):
    """What to look at."""

    models: tuple[LookedAtModel, ...] = ()
    """Folders of all roles that are started here."""
    model: Path
    """Folder with the tokenizer of the role that reads the data."""
    data: DataSpec
    seed: int
    """Seed of the run."""
    given: Given
    """What the algorithm reads of a row: "prompt" samples for it, "any" is not known."""
    max_model_len: int | None = None
    """Longest sequence of the sampler, in tokens; None: nothing is sampled."""
    max_new_tokens: int | None = None
    """Longest completion that is sampled, in tokens."""
    environment: EnvironmentSpec | None = None
    """What the policy talks to while it is sampled; None: nothing."""
    rewards: tuple[WeightedRewardSpec, ...] = ()
    """Sources of reward and cost, each with a name."""
    reward_timeout_s: float = 3.0
    """Longest wait for an answer of a reward, in seconds."""
    route: TeacherRouteSpec | None = None
    """Which of several teachers scores a row; None: there is one, or none."""
    own_functions: Mapping[str, OwnFunctionSpec] = Field(default_factory=dict)
    """Losses and estimators of the user, by the field of the recipe that names each."""


def families_of(models: Sequence[LookedAtModel]) -> tuple[dict[str, str], list[str]]:
    """Loads the config of each model, and the tokenizer where its role does.

    Returns:
        The family of each by its field, and what is wrong with the others.
    """
    import_light_transformers()
    families, faults = {}, []
    for model in models:
        try:
            families[model.field] = str(load_config(model.path, field=model.field).model_type)
            if model.has_tokenizer:
                load_tokenizer(model.path, field=model.field)
        except ValueError as error:
            faults.append(str(error))
    return families, faults


class Preview:
    """A look at one recipe. Raises in `__init__` what the role would raise at its start."""

    def __init__(self, spec: PreviewSpec, progress: Progress | None = None) -> None:
        """Loads tokenizer and data.

        Args:
            spec: What to look at.
            progress: Called from time to time while rows are read.

        Raises:
            ValueError: One of them cannot be read.
        """
        self._spec = spec
        self._tokenizer: ChatTokenizer = load_light_tokenizer(spec.model)
        self._prompts: PromptSet = load_prompts(
            spec.data,
            tokenizer=self._tokenizer,
            seed=spec.seed,
            measured_from=self._fits_whole,
            progress=progress,
            model=spec.model,
        )

    def counts(self) -> dict[str, Any]:
        """Rows of each split, those that were left out for their length, and those without answer.

        Raises:
            ValueError: A row lacks a column that the algorithm needs.
        """
        self._check_given()
        rows = self._every()
        unanswered = numpy.flatnonzero(~rows.has("answer")).tolist()
        return {
            "train": self._prompts.size("train"),
            "held_out": self._prompts.size("held_out"),
            "filtered": sum(self._prompts.num_filtered.values()),
            "unanswered": len(unanswered),
            "first_unanswered": rows[unanswered[0]].where if unanswered else "",
        }

    def teachers(self) -> dict[str, Any] | None:
        """How many rows go to which teachers, and the first row that goes to none.

        Returns:
            Counts by the teachers' names; None where there are no several teachers.
        """
        route = self._spec.route
        if route is None:
            return None
        counts: Counter[str] = Counter()
        lost: list[str] = []
        rows = self._every()
        for number in range(len(rows)):
            row = rows[number]
            value = routed_value(row.metadata, route.field) if route.field else None
            names = route.teachers_of(value)
            counts[" and ".join(names)] += 1
            if not names and not lost:
                lost = [row.where, "no value" if value is None else repr(value)]
        return {"rows": dict(sorted(counts.items())), "lost": lost}

    def _check_given(self) -> None:
        rows = self._every()
        texts = rows.has("text")
        for column in _NEEDED[self._spec.given]:
            lacks = ~rows.has(_FIELDS.get(column, column))
            if self._spec.given == "demonstration":
                lacks &= ~texts
            if lacks.any():
                raise ValueError(
                    f"{rows[int(lacks.argmax())].where}: lacks the column {column!r}, which the "
                    f"algorithm trains on: name the right one in data.columns.{column}, or take "
                    "another algorithm"
                )
        if self._spec.given == "prompt" and texts.any():
            self._prompts.renderer.prompt_text(rows[int(texts.argmax())])

    def _every(self) -> Rows:
        return Rows.joined([self._prompts.every("train"), self._prompts.every("held_out")])

    @property
    def _fits_whole(self) -> int | None:
        """The longest prompt that leaves room for max_new_tokens; None where nothing is sampled."""
        limit, wanted = self._spec.max_model_len, self._spec.max_new_tokens
        return None if limit is None or wanted is None else max(0, limit - wanted)

    def first(self) -> tuple[Prompt | None, str]:
        """The first row of the first step: its prompt, and the given completion as text.

        Raises:
            ValueError: It cannot be rendered.
        """
        ((index, row),) = self._prompts.rows("train", 0, 1)
        if row.text is not None:
            return None, row.text
        given = row.completion if row.completion is not None else row.chosen
        completion = ""
        if given is not None:
            tokens = self._prompts.renderer.completion(row, given).tokens
            completion = str(self._tokenizer.decode(tokens))
        return self._prompts.render(index, row), completion

    def lengths(self) -> dict[str, Any] | None:
        """Prompts that leave no room for a token, and those that leave less than max_new_tokens.

        Returns:
            Counts, and the longest such prompt; None where nothing is sampled.
        """
        limit, fits_whole = self._spec.max_model_len, self._fits_whole
        if limit is None or fits_whole is None:
            return None
        rows = self._every()
        found = long_prompts(rows, self._prompts.renderer, fits_whole)
        longest, where = (found[0][0], rows[found[0][1]].where) if found else (0, "")
        return {
            "prompts": len(rows),
            "no_room": sum(length >= limit for length, _ in found),
            "less_room": sum(length < limit for length, _ in found),
            "longest": longest,
            "where": where,
        }

    def environment(self) -> str:
        """Makes the environment as the sampler does, and begins an episode with the first prompt.

        Returns:
            Its name, empty where the recipe has none.

        Raises:
            UserCodeError: It cannot be loaded or made, or its reset fails.
        """
        spec = self._spec.environment
        if spec is None:
            return ""
        if isinstance(spec, AgentSpec):
            # It asks the policy, which nothing serves here; its code is loaded all the same.
            if isinstance(spec, PythonAgentSpec):
                RunEnvironment(spec.run)
            return spec.type
        environment = environment_maker(spec, find_sandbox(sandbox_mode(os.environ)))()
        prompt, _ = self.first()
        if prompt is not None:
            try:
                opening_of(environment, prompt)
            except Exception as error:
                # The user's code: it may raise anything.
                raise UserCodeError(
                    f"reset of the environment failed for the first prompt: {raised(error)}"
                ) from error
        return spec.environment if isinstance(spec, PythonEnvironmentSpec) else spec.type

    async def rewards(self) -> list[dict[str, Any]]:
        """What each reward from outside says of the first prompt with its answer as completion.

        Returns:
            A mapping for each source: name, completion, and reward or error.
        """
        prompt, _ = self.first()
        if prompt is None:
            return []
        has_images = self._prompts.has_images
        row = rows_of_prompt(prompt, self._tokenizer, has_images=has_images)[0]
        told = []
        for named in self._spec.rewards:
            if isinstance(named.source, OutsideRewardSpec):
                name = named.name or named.source.type
                found = await self._judged(name, named.source, row)
                told.append({"name": name, "completion": row.completion, **found})
        return told

    async def _judged(self, name: str, spec: OutsideRewardSpec, row: Any) -> dict[str, Any]:
        limit = min(spec.timeout_s, self._spec.reward_timeout_s)
        # One try: what a run survives later is not of interest here.
        changes = {"timeout_s": limit, "deadline_s": limit, "tries": 1, "hedge_after_s": None}
        known = {key: value for key, value in changes.items() if hasattr(spec, key)}
        try:
            sandbox = find_sandbox(sandbox_mode(os.environ))
            reward = make_outside_reward(name, spec.model_copy(update=known), sandbox)
        except ValueError as error:
            return {"error": str(error)}
        try:
            if isinstance(spec, PythonRewardSpec):
                await reward.open()
            judgement = await reward.judge([row])
        except OutsideRewardError as error:
            return {"error": str(error)}
        finally:
            await reward.close()
        if judgement.failures:
            return {"error": str(judgement.failures[0])}
        return {"reward": judgement.rewards[0]}
