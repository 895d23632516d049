"""Recipes of clients, read and checked as far as they can be before their run's process starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rolemesh.coordinator.dataflow.observer import QuietObserver
from rolemesh.coordinator.recipe.algorithm.algorithms import CustomSpec
from rolemesh.coordinator.recipe.errors import RecipeError
from rolemesh.coordinator.recipe.hub.hf_files import cache_folders, with_files
from rolemesh.coordinator.recipe.loading import read_recipe
from rolemesh.coordinator.recipe.schema import Recipe
from rolemesh.coordinator.recipe.sections.api_section import ApiSpec
from rolemesh.coordinator.recipe.sections.stores import RedisStoreSpec
from rolemesh.coordinator.run.saving.resume import ResumeError, check_changes, open_run
from rolemesh.coordinator.run.session import InputError, Session
from rolemesh.engine.granted.grants import Grant, NotGrantedError
from rolemesh.engine.specs import named_in
from rolemesh.rpc.errors import ForbiddenError, InvalidRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientRecipes:
    """What a coordinator makes of the recipes that clients send."""

    api: ApiSpec
    """Where the processes of runs answer by themselves, in place of what a recipe says."""
    store: RedisStoreSpec
    """Where they keep their state, likewise."""
    grant: Grant
    """What recipes may name."""

    def read(
        self,
        text: str,
        overrides: Sequence[str],
        environment: Mapping[str, str],
        run_id: str,
        folder: Path,
        *,
        resumes: bool,
    ) -> Recipe:
        """The recipe that the process of a run gets.

        Args:
            text: What the client sent.
            overrides: Fields to set besides.
            environment: Variables that set fields, too.
            run_id: The run.
            folder: Folder of its files.
            resumes: Whether the folder holds the run.

        Raises:
            ForbiddenError: It names what the owner has not granted.
            InvalidRequestError: It is no recipe, or none that this run could have.
        """
        try:
            recipe = read_recipe(text, "recipe", overrides=overrides, environment=environment)
            self._check_named(recipe)
            # Whoever may send a recipe does not decide what this host fetches, or with which token.
            recipe = with_files(recipe, fetches=False)
            recipe = recipe.model_copy(update={"api": self.api, "store": self.store})
            # Only the run's own process may run the code of a custom algorithm.
            if not isinstance(recipe.algorithm, CustomSpec):
                Session(recipe, folder, QuietObserver(), run_id=run_id, resumes=resumes)
            elif resumes:
                check_changes(open_run(folder).recipe, recipe)
        except NotGrantedError as error:
            raise ForbiddenError(str(error), reason="NOT_GRANTED") from error
        except (RecipeError, InputError, ResumeError) as error:
            raise InvalidRequestError(str(error), reason="RECIPE_INVALID") from error
        return recipe

    def _check_named(self, recipe: Recipe) -> None:
        cached = cache_folders(recipe)
        for named in named_in(recipe):
            if named.field in cached:
                self.grant.folder(str(cached[named.field]), named.field)
            # The sections and the folder that count for nothing here.
            elif not named.field.startswith(("api.", "store.", "run.directory")):
                self.grant.check_named(named)
