"""The section of the teacher: who holds it, and where there are several, who scores what."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.layout.ranks import HybridLayout
from rolemesh.engine.specs.models.sections import LayoutSpec, ModelSpec
from rolemesh.engine.specs.roles import RoleSpec
from rolemesh.engine.specs.sampling.servers import ServersSpec
from rolemesh.engine.specs.scores.outside_rewards import DropGroupSpec, FailSpec
from rolemesh.engine.specs.scores.teacher_prompts import SelfTeacherSpec, TeacherPromptSpec
from rolemesh.engine.specs.scores.teacher_routes import TeacherName, TeacherRouteSpec


class TeacherServerSpec(ServersSpec):
    """Servers of vLLM that score the policy's tokens; asked by token ids, at /v1/completions.

    They give log-probs at temperature 1 alone. `vllm serve --max-logprobs` bounds how many of the
    likeliest tokens they tell.
    """

    model: str = Field(min_length=1)
    """Name of the teacher at the servers, of a model or of an adapter."""
    policy_folder: Path | None = None
    """Folder of the policy's model, of which config and tokenizer are read: the servers' tokens are
    held against these. None: the actor's model.path where a run starts both services itself;
    otherwise nothing is compared."""
    on_failure: Annotated[FailSpec | DropGroupSpec, Field(discriminator="type")] = FailSpec()
    """What becomes of rows that could not be scored."""

    @property
    def may_drop(self) -> bool:
        """Whether rows may come without scores, to be left out of the step."""
        return isinstance(self.on_failure, DropGroupSpec)


class OneTeacherSpec(RoleSpec):
    """A teacher: a frozen policy that the trained one is drawn to, or that one itself."""

    _HOLDERS: ClassVar[tuple[str, ...]] = ("model", "server", "of")

    model: ModelSpec | None = None
    """The policy, with the same vocabulary as the actor's."""
    server: TeacherServerSpec | None = None
    """Servers that hold the policy, in place of model; the service then asks them."""
    of: Literal["actor"] | None = None
    """The role that is the teacher: the policy itself, which the actor scores; then there is no
    service of the role. None: the model is, or the servers."""
    average: float | None = Field(default=None, gt=0, lt=1)
    """With `of`: the teacher is the policy's own moving average (SDFT, arXiv 2601.19897; SDPO,
    arXiv 2601.20802), of which an optimizer step leaves this part: average = a * average + (1 - a)
    * weights. None: the policy as it is now."""
    prompt: TeacherPromptSpec | None = None
    """What the teacher is told in the place of what the student was; None: the same."""
    layout: LayoutSpec = LayoutSpec()
    """How the model is spread over ranks."""

    @model_validator(mode="after")
    def _check_holder(self) -> Self:
        holders = [name for name in self._HOLDERS if getattr(self, name) is not None]
        if len(holders) != 1:
            raise ValueError(
                f"{' and '.join(holders) or 'no holder'} given: give one of model, e.g. {{path: "
                "FOLDER}, server, e.g. {urls: [http://HOST:8000], model: NAME}, and of: actor, "
                "with which the policy is its own teacher"
                + (", or named for several" if "named" in self._HOLDERS else "")
            )
        if self.of is None and self.average is not None:
            raise ValueError(
                f"average is {self.average}, but this teacher is a model of its own, which does "
                "not change: leave it out, or set of to 'actor' and leave model out"
            )
        if self.server is not None and self.layout.layout().world_size > 1:
            raise ValueError(
                f"layout has {self.layout.layout().world_size} ranks, but the servers hold the "
                "model: leave layout out, and give vllm serve --tensor-parallel-size"
            )
        if self.of is not None:
            self._check_of()
        return self

    def _check_of(self) -> None:
        for name in ("layout", "numerics"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is given, but of is {self.of!r}: the actor scores with its own "
                    f"model, layout and numerics; leave {name} out, or of"
                )

    def as_actor(self) -> SelfTeacherSpec | None:
        """What the actor is told where it is the teacher; None where there is nothing to tell."""
        if self.of is None or (self.average is None and self.prompt is None):
            return None
        return SelfTeacherSpec(average=self.average, prompt=self.prompt)

    def rank_layout(self) -> HybridLayout:
        """The layout as rank arithmetic."""
        return HybridLayout(self.layout.layout())


class TeacherSpec(OneTeacherSpec):
    """The teacher, or several by name, each a service with its own model, layout and pool."""

    _HOLDERS: ClassVar[tuple[str, ...]] = ("model", "server", "of", "named")

    named: dict[TeacherName, OneTeacherSpec] | None = Field(default=None, min_length=1)
    """Several teachers, by names of your choice. Each is a role of its own, teacher-NAME, in pools
    and services."""
    route: TeacherRouteSpec | None = None
    """Which of them score a row. Needed with several."""

    @model_validator(mode="after")
    def _check_named(self) -> Self:
        if (self.named is None) != (self.route is None):
            given, absent = ("named", "route") if self.route is None else ("route", "named")
            raise ValueError(f"{given} is given without {absent}: give both for several teachers")
        if self.named is None or self.route is None:
            return self
        for name in ("average", "prompt", "layout", "numerics"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is given beside named: give it to each teacher, as named.NAME.{name}"
                )
        asked = self.route.names
        if unknown := [name for name in asked if name not in self.named]:
            raise ValueError(
                f"route names the teacher {unknown[0]!r}, but named has {', '.join(self.named)}: "
                "name one of these"
            )
        if idle := [name for name in self.named if name not in asked]:
            raise ValueError(
                f"named.{idle[0]} scores no row by route: name it there, or take it out"
            )
        selves = [name for name, one in self.named.items() if one.of is not None]
        if len(selves) > 1:
            raise ValueError(
                f"named.{selves[0]} and named.{selves[1]} are both of 'actor', which keeps one "
                "average and one prompt: give one such teacher"
            )
        for name, one in self.named.items():
            if one.server is not None and one.server.may_drop:
                raise ValueError(
                    f"named.{name}.server.on_failure is 'drop_group', which a teacher does that is "
                    "alone: of several each knows only its own rows of a prompt; set it to 'fail'"
                )
        return self
