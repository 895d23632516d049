"""A job: what is to be placed, without saying where. A plan is its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolemesh.coordinator.mapping.errors import PlanError
from rolemesh.coordinator.mapping.job.layouts import Freedom
from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.coordinator.mapping.job.systems import ROLEMESH, System
from rolemesh.coordinator.mapping.job.tasks import Step
from rolemesh.coordinator.mapping.job.work import Work


@dataclass(frozen=True, kw_only=True)
class Role:
    """A role with a model, as far as its costs are concerned."""

    name: str
    model: Model
    trains: bool = False
    """Whether it has optimizer steps."""
    samples: bool = False
    """Whether it generates."""
    freedom: Freedom = field(default_factory=Freedom)
    """What may be chosen for it."""
    most_rows: int = 1024
    """Rows that a sampler replica decodes together at most."""
    is_plain: bool = False
    """Whether plain transformers samples, which computes a prompt for each of its completions."""
    averages: bool = False
    """Whether a moving average of its trained parameters is kept, in float32."""
    frozen_bytes: int | None = None
    """Of a parameter that is not trained; None: as the system has it."""
    has_muon: bool = False
    """Whether matrices of layers are trained by Muon, which keeps one moment of each."""

    @property
    def only_samples(self) -> bool:
        """Whether it holds nothing but a sampler."""
        return self.samples and not self.trains


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a user wants of the placement."""

    together: tuple[tuple[str, str], ...] = ()
    """Pairs of roles that share a pool."""
    apart: tuple[tuple[str, str], ...] = ()
    """Pairs of roles that do not."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """Most devices of the pool of a role, by role."""
    on: Mapping[str, str] = field(default_factory=dict)
    """Kind of device that a role is to have, by role."""

    def allows(self, sets: tuple[tuple[str, ...], ...]) -> bool:
        """Whether a placement has all pairs as they are wished."""
        place = {role: index for index, one in enumerate(sets) for role in one}
        return all(place[a] == place[b] for a, b in self.together) and all(
            place[a] != place[b] for a, b in self.apart
        )

    def check(self, roles: tuple[str, ...], kinds: tuple[str, ...]) -> None:
        """Raises PlanError where wishes name what there is not, or contradict each other."""
        named = [role for pair in (*self.together, *self.apart) for role in pair]
        for role in (*named, *self.devices, *self.on):
            if role not in roles:
                raise PlanError(
                    f"a wish names the role {role!r}, but the roles with a model are "
                    f"{', '.join(roles)}"
                )
        for role, kind in self.on.items():
            if kind not in kinds:
                raise PlanError(
                    f"{role} is to be on {kind!r}, but the cluster has {', '.join(kinds)}"
                )
        for role, number in self.devices.items():
            if number < 1:
                raise PlanError(f"{role} is to have {number} devices: give at least 1")
        joined = {role: {role} for role in roles}
        for a, b in self.together:
            both = joined[a] | joined[b]
            for role in both:
                joined[role] = both
        for a, b in self.apart:
            if b in joined[a]:
                raise PlanError(
                    f"{a} and {b} are to be apart, and also together"
                    f"{'' if a != b else ' (they are the same role)'}: take one of these wishes "
                    "back"
                )
        for a, kind in self.on.items():
            for b in joined[a]:
                if self.on.get(b, kind) != kind:
                    raise PlanError(
                        f"{a} is to be on {kind} and {b} on {self.on[b]}, but they are to be "
                        "together: take one of these wishes back"
                    )


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be placed."""

    roles: tuple[Role, ...]
    """Those that have a model. All other tasks of the step cost what the rows cost a rule."""
    step: Step
    work: Work
    system: System = ROLEMESH
    wishes: Wishes = field(default_factory=Wishes)

    def role(self, name: str) -> Role:
        """The role of a name."""
        return next(role for role in self.roles if role.name == name)
