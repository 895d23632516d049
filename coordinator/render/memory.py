"""Estimate of the shared memory that a recipe's services need on their host."""

from __future__ import annotations

from pathlib import Path

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.model_sizes import num_trained_parameters, trained_models
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.schedule import AsyncSamplerSpec, OneStepAheadSpec
from rolemesh.engine.specs import ModelSpec

BYTES_PER_TOKEN = 64
"""Most bytes that a role holds for one token: 8 for its id, 8 for its policy_version, 1 for the
mask, 24 for six float32 columns, and about 8 of text. The rest is for alignment."""

BYTES_PER_ROW = 8 << 10
"""Bytes for columns with one value in each row: answer, metadata, lengths and ids. The metadata of
a row may have 64 KiB, but seldom has 1 KiB."""

_UNIT = 64 << 20
_LEAST_BYTES = 512 << 20
"""Least size, also for a recipe without a longest row: the default of docker-compose.yml."""

_BESIDE_BYTES = 1 << 30
"""Bytes for NCCL and torch, which keep their own buffers in /dev/shm."""

_PUBLISHED_BYTES = 4
"""Bytes of published weights for each byte of the model's folder: two copies, the newest one and
the one being fetched, in float32, of a model that lies in bfloat16."""

_LEAST_SHARED_BYTES = 12 << 30
"""The default of docker-compose.yml. A rendered file never goes below it: it limits what may be
used, and takes no memory by itself."""

_CUT_BYTES = 12
"""Bytes of cuts for each byte of a trained model's folder: two of them, each with weights and two
moments in float32, of a model that lies in bfloat16."""

_ADAPTER_PUBLISHED_BYTES = 8
"""Bytes of published weights for each parameter of an adapter: two copies in float32."""

_ADAPTER_CUT_BYTES = 24
"""Bytes of cuts for each parameter of an adapter: two of them, each with three numbers in float32.
"""


def experience_bytes(recipe: Recipe) -> int:
    """Bytes of experience that one rank may have to hold, rounded up.

    This counts all rows of the steps in flight at full length on one rank, although ranks share the
    rows.
    """
    sampler, sampling, rollout = recipe.schedule.sampler, recipe.sampling, recipe.sampler
    if sampling is None or rollout is None:
        return _LEAST_BYTES
    in_flight = 1
    if isinstance(sampler, OneStepAheadSpec):
        in_flight = 2
    elif isinstance(sampler, AsyncSamplerSpec):
        in_flight = 2 + sampler.max_staleness
    rows = in_flight * recipe.run.prompts_per_step * (sampling.samples_per_prompt + 1)
    evaluation = recipe.run.evaluation
    rows = max(rows, evaluation.num_prompts * evaluation.samples_per_prompt)
    needed: int = rows * (rollout.max_model_len * BYTES_PER_TOKEN + BYTES_PER_ROW)
    return max(_LEAST_BYTES, -(-needed // _UNIT) * _UNIT)


def shared_memory_bytes(recipe: Recipe) -> int:
    """Size of the /dev/shm that all services of a recipe share: a limit, not memory in use.

    A trained model that is not on this machine adds no bytes for its cuts: see `unsized_models`.

    Raises:
        RecipeError: The actor publishes weights, but its model's folder is not on this machine.
    """
    num_ranks = sum(
        recipe.layout(role).world_size * len(recipe.services_of(role)) for role in recipe.roles
    )
    total = num_ranks * experience_bytes(recipe) + _BESIDE_BYTES
    if recipe.rollout is not None:
        folder = recipe.rollout.model.path
        published = _published_bytes(recipe, folder)
        if not published:
            raise RecipeError(
                f"rollout.model.path is {folder}, which holds no *.safetensors here, and the size "
                "of shared memory depends on them: run this where the model is, or make it first"
            )
        total += published
    if recipe.run.recovery.cuts:
        total += sum(_cut_bytes(model) for model in trained_models(recipe).values())
    return -(-max(total, _LEAST_SHARED_BYTES) // _UNIT) * _UNIT


def unsized_models(recipe: Recipe) -> list[Path]:
    """Folders of trained models that hold no weights here, so that their cuts are not counted.

    The size of an adapter's follows from config.json.
    """
    if not recipe.run.recovery.cuts:
        return []
    return [model.path for model in trained_models(recipe).values() if not _cut_bytes(model)]


def _published_bytes(recipe: Recipe, folder: Path) -> int:
    """Of the weights that go to rollout services: with an adapter, of its factors alone."""
    if recipe.actor is not None and recipe.actor.model.adapter is not None:
        return _ADAPTER_PUBLISHED_BYTES * (num_trained_parameters(recipe.actor.model) or 0)
    return _PUBLISHED_BYTES * _model_bytes(folder)


def _cut_bytes(model: ModelSpec) -> int:
    """Of a trained model, or of the adapter that is trained in its place."""
    if model.adapter is not None:
        return _ADAPTER_CUT_BYTES * (num_trained_parameters(model) or 0)
    return _CUT_BYTES * _model_bytes(model.path)


def _model_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
