"""Makes folders of this machine of what a recipe names at the Hugging Face hub.

For commands alone, which fetch what the cache lacks. Everything behind sees the folder in the hub's
ordinary cache (HF_HOME), and the name with its commit (`Recipe.hf_names`). Services are offline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_client import Found, Hub, Kind, Wish
from rolemesh.coordinator.recipe.hub.hf_names import HfName, HfPlace, hf_places, with_values
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.engine.specs import (
    AdapterSpec,
    HfDatasetSpec,
    ModelFolderSpec,
    ModelSpec,
    StoredRowsSpec,
)

_MODELS = (ModelSpec, ModelFolderSpec)
"""Sections that name a model."""


def with_files(
    recipe: Recipe, *, weights: bool = True, fetches: bool = True, began_with: Recipe | None = None
) -> Recipe:
    """The recipe with folders of this machine where it names models and data at the hub.

    Args:
        recipe: As it was loaded.
        weights: Whether weights are needed; False brings settings and tokenizers alone.
        fetches: Whether what the cache lacks is fetched.
        began_with: The recipe of the run that goes on: names without a revision keep its commits.

    Raises:
        RecipeError: Something is not there, or cannot be had; names field, value and remedy.

    Example::

        found = with_files(load_recipe([path]))
        found.actor.model.path  # .../models--Qwen--Qwen3-0.6B/snapshots/c1899de...
        found.hf_names  # {"actor.model.path": "hf:Qwen/Qwen3-0.6B@c1899de..."}
    """
    found = found_files(recipe, weights=weights, fetches=fetches, began_with=began_with)
    if not found:
        return recipe
    folders = {field: one.folder for field, one in found.items()}
    resolved: Recipe = with_values(recipe, folders)
    names = {field: str(one.name) for field, one in found.items()}
    return resolved.knowing({**recipe.hf_names, **names})


def found_files(
    recipe: Recipe, *, weights: bool = True, fetches: bool = True, began_with: Recipe | None = None
) -> dict[str, Found]:
    """What a recipe names at the hub, by field; see with_files."""
    places = list(hf_places(recipe))
    if not places:
        # Most recipes: the client takes half a second to import.
        return {}
    pins = {} if began_with is None else {one.field: one.text for one in hf_places(began_with)}
    hub = Hub(fetches=fetches)
    actor = recipe.actor
    # Its adapter goes to samplers, which add it to weights of their own.
    readers = (ModelSpec,) if actor is None or actor.model.adapter is None else _MODELS
    found = {}
    for place in places:
        wish = _wish_of(place)
        wish = replace(wish, name=_pinned(wish.name, pins.get(place.field)))
        if isinstance(place.spec, HfDatasetSpec):
            found[place.field] = _data(hub, wish, place.spec)
        elif isinstance(place.spec, AdapterSpec):
            found[place.field] = hub.adapter(wish, weights=weights)
        else:
            is_read = weights and isinstance(place.spec, readers)
            found[place.field] = hub.model(wish, weights=is_read)
    return found


def model_folder(text: str, field: str, *, weights: bool = True) -> tuple[HfName, Path]:
    """One model's name with its commit, and its folder.

    Args:
        text: The name.
        field: Where it was given, e.g. "--model".
        weights: As in with_files.

    Raises:
        RecipeError: As with_files.
    """
    wish = _wish(field, text, "model")
    found = Hub(fetches=True).model(wish, weights=weights)
    return found.name, found.folder


def data_folder(text: str, field: str, held_out: Sequence[str]) -> tuple[HfName, Path]:
    """One data set's name with its commit, and its folder, with the training rows.

    Args:
        text: The name.
        field: Where it was given, e.g. "--from".
        held_out: Splits of which the first that is there is brought as well, unless the name says
            another split than train.

    Raises:
        RecipeError: As with_files.
    """
    wish = _wish(field, text, "dataset")
    split = wish.name.split or "train"
    others = held_out if split == "train" else ()
    found = Hub(fetches=True).data(wish, (split,), config=wish.name.config, one_of=others)
    return found.name, found.folder


def cache_folders(recipe: Recipe) -> dict[str, Path]:
    """Folder of the cache in which each name of a recipe would lie, by field.

    Raises:
        RecipeError: A name is none.
    """
    wishes = [_wish_of(place) for place in hf_places(recipe)]
    return {one.field: Hub(fetches=False).cache_folder(one) for one in wishes}


def _wish_of(place: HfPlace) -> Wish:
    if isinstance(place.spec, HfDatasetSpec):
        return _wish(place.field, place.text, "dataset")
    if isinstance(place.spec, (*_MODELS, AdapterSpec)):
        return _wish(place.field, place.text, "model")
    rows = (
        ", or, for rows, data of type hf_dataset" if isinstance(place.spec, StoredRowsSpec) else ""
    )
    raise RecipeError(
        f"{place.field} is {place.text!r}, but here nothing of the Hugging Face hub can be named: "
        f"give a path of this machine{rows}"
    )


def _wish(field: str, text: str, kind: Kind) -> Wish:
    try:
        wish = Wish(field=field, name=HfName.parse(text), kind=kind)
    except ValueError as error:
        raise RecipeError(f"{field} is {text!r}: {error}") from None
    if kind == "model" and wish.name.config is not None:
        raise wish.refused("a model has no :CONFIG: leave it out")
    return wish


def _data(hub: Hub, wish: Wish, spec: HfDatasetSpec) -> Found:
    name, section = wish.name, wish.field.removesuffix(".path")
    for field, said, given in (
        ("name", name.config, spec.name),
        ("split", name.split, spec.split),
    ):
        if said is not None and given is not None and said != given:
            raise wish.refused(f"{section}.{field} is {given!r}: give one of them")
    splits = (one for one in (spec.split, spec.held_out_split) if one is not None)
    found = hub.data(wish, splits, config=name.config or spec.name)
    # Where the section has a name, it says the rest of the way.
    return found if spec.name is None else replace(found, part="")


def _pinned(name: HfName, begun: str | None) -> HfName:
    """The name with the commit of the run that goes on, unless it asks for a revision itself."""
    if begun is None or name.revision is not None:
        return name
    kept = HfName.parse(begun)
    return kept if kept.is_pinned and name.at(str(kept.revision)) == kept else name
