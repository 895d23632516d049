"""The recipe: everything that describes a run, in one validated tree.

The sections of the roles are the engine's own specs, so that a service validates what it
receives with the class that validated the recipe. Loading and overrides are in `loading`,
suggestions in `errors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, PrivateAttr, model_validator

from rolemesh.coordinator.recipe.algorithm.algorithms import (
    EXTERNAL,
    AlgorithmSection,
    AlgorithmSpec,
    SampledSpec,
)
from rolemesh.coordinator.recipe.algorithm.group_estimators import with_group_estimator
from rolemesh.coordinator.recipe.algorithm.off_policy import with_off_policy
from rolemesh.coordinator.recipe.algorithm.stops import check_stops
from rolemesh.coordinator.recipe.algorithm.teachers import (
    check_teachers,
    named_in_data,
    with_teachers,
)
from rolemesh.coordinator.recipe.role_names import (
    ROLES,
    role_of,
    service_names,
    teacher_role,
)
from rolemesh.coordinator.recipe.roles.placement import REGISTERED, PoolSpec, ServiceSpec
from rolemesh.coordinator.recipe.roles.places import check_places
from rolemesh.coordinator.recipe.roles.replicas import check_replicas
from rolemesh.coordinator.recipe.roles.sent_sections import sent_section, to_sent
from rolemesh.coordinator.recipe.roles.served_by_actor import check_served_by_actor, served_by_actor
from rolemesh.coordinator.recipe.roles.server_samplers import check_server_samplers
from rolemesh.coordinator.recipe.roles.shown_images import check_images
from rolemesh.coordinator.recipe.sections.api_section import ApiSpec
from rolemesh.coordinator.recipe.sections.plan_section import PlanSpec
from rolemesh.coordinator.recipe.sections.run_section import RunSpec
from rolemesh.coordinator.recipe.sections.schedule import ScheduleSpec, check_schedule
from rolemesh.coordinator.recipe.sections.stores import EmbeddedStoreSpec, StoreSpec
from rolemesh.coordinator.recipe.sections.trackers import TrackerSpec
from rolemesh.coordinator.recipe.sections.tuning import check_tuning
from rolemesh.engine.layout.ranks import TrainLayout
from rolemesh.engine.specs import (
    ActorSpec,
    ClassifierRewardSpec,
    CostSpec,
    CriticSpec,
    Names,
    OneTeacherSpec,
    OwnFunctionSpec,
    ReferenceSpec,
    RewardSpec,
    RoleSpec,
    RolloutRoleSpec,
    RolloutSpec,
    SamplingSpec,
    SelfTeacherSpec,
    Spec,
    TeacherSpec,
    may_drop_groups,
    named_sources,
)
from rolemesh.engine.specs.columns import source_column


class TracingSpec(Spec):
    """OpenTelemetry traces of the run and of the services that are started for it."""

    endpoint: Annotated[str, Names("url")] = Field(pattern=r"^https?://[^/\s]+$")
    """Collector that takes OTLP over gRPC, e.g. http://127.0.0.1:4317."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of runs that are traced."""


class Recipe(Spec):
    """A run: what to train, on what, how, and where."""

    run: RunSpec
    algorithm: AlgorithmSpec
    """What a step does: `type` names the algorithm."""
    actor: ActorSpec | None = None
    critic: CriticSpec | None = None
    reference: ReferenceSpec | None = None
    teacher: TeacherSpec | None = None
    reward: RewardSpec | None = None
    cost: CostSpec | None = None
    rollout: RolloutRoleSpec | None = None
    """Samples apart from the actor; None: the actor samples."""
    schedule: ScheduleSpec = ScheduleSpec()
    """When a step's work may overlap with that of others."""
    pools: dict[str, PoolSpec] = Field(default_factory=dict)
    """Device sets and the roles that share them. Every role stands in exactly one. Left out, the
    roles are spread over the GPUs of the host that makes the run; without GPUs all share its CPU.
    """
    services: dict[str, ServiceSpec] = Field(default_factory=dict)
    """Where each role's service is; roles that are left out are started on loopback."""
    store: StoreSpec = EmbeddedStoreSpec()
    """Where the coordinator keeps what runs have reached."""
    api: ApiSpec = ApiSpec()
    certificates: Path | None = None
    """Folder that `rolemesh certs` keeps, with coordinator.pem and a file <role>.pem for each role
    that is started here: services then talk encrypted, and to members of the mesh only. None: a run
    that starts all of its services makes certificates of its own, another one talks in clear."""
    trackers: tuple[TrackerSpec, ...] = ()
    """Where scalars go beside metrics.jsonl and TensorBoard's files, which every run has."""
    tracing: TracingSpec | None = None
    """Where traces go; None: where OTEL_EXPORTER_OTLP_ENDPOINT says, if it is set."""
    plan: PlanSpec | None = None
    """What `rolemesh plan --write` predicted, to be shown beside what steps take; it decides
    nothing. None: the recipe was not planned."""
    _hf_names: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @property
    def hf_names(self) -> Mapping[str, str]:
        """The names at the Hugging Face hub that paths of this recipe stand for, by field.

        Each with its commit: {"actor.model.path": "hf:ORG/NAME@<commit>"}. Empty as long as the
        paths are the names themselves; see `hf_files`.
        """
        return self._hf_names

    def knowing(self, hf_names: Mapping[str, str]) -> Self:
        """The same recipe, whose paths stand for these names."""
        known = self.model_copy()
        known._hf_names = dict(hf_names)
        return known

    @model_validator(mode="before")
    @classmethod
    def _share_one_pool(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("pools"):
            return data
        roles = [
            name
            for role in ROLES
            if data.get(role) is not None
            for name in (named_in_data(data[role]) if role == "teacher" else [role])
        ]
        return {**data, "pools": {"main": {"roles": roles}}} if roles else data

    @model_validator(mode="before")
    @classmethod
    def _leave_steps_to_the_client(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("algorithm") != {"type": EXTERNAL}:
            return data
        run = data.get("run")
        # Required of every other algorithm; here no code reads them.
        return {**data, "run": {"steps": 1, "prompts_per_step": 1, **run}} if run else data

    @model_validator(mode="after")
    def _correct_policy(self) -> Self:
        """Fills in the correction that fast numerics need, where the recipe leaves it out.

        Trainer and sampler round apart, by 0.02 in a log-prob. Each token's loss is weighted by
        its truncated importance ratio, as libraries do (arXiv 2505.24298, section 5.2).
        """
        corrected = with_off_policy(self.algorithm, self.run.numerics, self.run.prompts_per_step)
        # The recipe is frozen for its users, who get it after this.
        object.__setattr__(self, "algorithm", corrected)
        return self

    @model_validator(mode="after")
    def _weigh_rewards(self) -> Self:
        """Fills in the weights of several rewards, where an estimator and not their sum takes them.

        They stand once, in reward.source.
        """
        fitted = with_group_estimator(self.algorithm, self.reward)
        object.__setattr__(self, "algorithm", fitted)
        return self

    @model_validator(mode="after")
    def _tell_of_teachers(self) -> Self:
        """Fills in how many teachers score a row; section teacher says it."""
        told = with_teachers(self.algorithm, self.teacher)
        object.__setattr__(self, "algorithm", told)
        return self

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that have a section, and services by it."""
        return tuple(role for role in self.sections if role not in self.served_by_actor)

    @property
    def sections(self) -> Mapping[str, RoleSpec]:
        """The section of each role that has one. Of several teachers each has its own."""
        found: dict[str, RoleSpec] = {}
        for kind in ROLES:
            section: RoleSpec | None = getattr(self, kind)
            if isinstance(section, TeacherSpec) and section.named is not None:
                found |= {teacher_role(name): one for name, one in section.named.items()}
            elif section is not None:
                found[kind] = section
        return found

    @property
    def teachers(self) -> Mapping[str, OneTeacherSpec]:
        """The section of each teacher, by its role."""
        return {
            role: section
            for role, section in self.sections.items()
            if isinstance(section, OneTeacherSpec)
        }

    @property
    def served_by_actor(self) -> frozenset[str]:
        """Roles that have a section and no service, since the actor answers for them.

        A reference without a model is the actor's base, which scores with the adapter off; a
        teacher may be the policy itself.
        """
        return served_by_actor(self)

    @property
    def self_teacher(self) -> SelfTeacherSpec | None:
        """What the actor is told of itself as the teacher; None where there is nothing to tell."""
        return next((one.as_actor() for one in self.teachers.values() if one.of is not None), None)

    @property
    def actor_average(self) -> float | None:
        """Part of the moving average of the policy that a step leaves; None: none is kept."""
        return None if self.self_teacher is None else self.self_teacher.average

    @property
    def sampling(self) -> SamplingSpec | None:
        """How the algorithm samples; None where it works on data that is given."""
        return self.algorithm.sampling if isinstance(self.algorithm, SampledSpec) else None

    @property
    def sampler(self) -> RolloutSpec | None:
        """What samples trajectories: that of the rollout role, else the actor's own."""
        if self.rollout is not None:
            return self.rollout.rollout
        return None if self.actor is None else self.actor.rollout

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        if self.run.checkpoint.keep_best is not None and self.algorithm.type == EXTERNAL:
            raise ValueError(
                "run.checkpoint.keep_best is given, but a client makes the steps of algorithm "
                f"{EXTERNAL!r}, and its checkpoints: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        check_served_by_actor(self)
        check_places(self)
        return self

    @property
    def may_drop(self) -> frozenset[str]:
        """Roles that may leave rows out of a step (on_failure: drop_group)."""
        judges = {role: getattr(self, role) for role in ("reward", "cost")}
        found = {role for role, spec in judges.items() if spec and may_drop_groups(spec.source)}
        server = None if self.teacher is None else self.teacher.server
        if server is not None and server.may_drop:
            found.add("teacher")
        return frozenset(found)

    @property
    def reward_columns(self) -> tuple[str, ...]:
        """Columns with the rewards of one source each, where the reward has several."""
        sources = () if self.reward is None else named_sources(self.reward.source)
        return tuple(source_column(str(one.name)) for one in sources) if len(sources) > 1 else ()

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        if not isinstance(self.algorithm, AlgorithmSection):
            return self
        least = self.algorithm.least_prompts
        for name, number in (
            ("prompts_per_step", self.run.prompts_per_step),
            ("evaluation.num_prompts", self.run.evaluation.num_prompts or least),
        ):
            if number < least:
                raise ValueError(
                    f"run.{name} is {number}, but algorithm {self.algorithm.type!r} needs {least} "
                    "rows of data together: give more"
                )
        return self

    @model_validator(mode="after")
    def _check_dropping(self) -> Self:
        if self.may_drop and self.algorithm.type == "remax":
            raise ValueError(
                f"{min(self.may_drop)}: on_failure is 'drop_group', but algorithm 'remax' needs "
                "the reward of each prompt's greedy completion: set on_failure to 'fail' or 'value'"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        check_schedule(self)
        check_replicas(self)
        check_server_samplers(self)
        check_teachers(self)
        check_stops(self)
        check_images(self)
        if self.sampling is not None and self.actor and self.sampler is None:
            raise ValueError(
                f"algorithm {self.algorithm.type!r} samples, but the recipe names no sampler: give "
                "actor.rollout, e.g. {type: vllm}, or a rollout section for services of their own"
            )
        if self.rollout is not None and self.actor is not None:
            for field in ("data", "environment"):
                if getattr(self.rollout, field) != getattr(self.actor, field):
                    raise ValueError(
                        f"rollout.{field} differs from actor.{field}: the rollout role samples the "
                        "actor's prompts; give both the same"
                    )
            if self.rollout.model.adapter is not None:
                raise ValueError(
                    "rollout.model.adapter is given: the rollout role samples with the adapter of "
                    "actor.model; leave it out"
                )
        return self

    def section(self, role: str) -> RoleSpec:
        """The role's section; raises ValueError when the recipe has none."""
        section = self.sections.get(role)
        if section is None:
            raise ValueError(
                f"algorithm {self.algorithm.type!r} needs the role {role!r}, but the recipe has no "
                f"section {role}: add one"
            )
        return section

    def sent_section(self, role: str) -> RoleSpec:
        """The role's section as its services get it; see `sent_sections`.

        Raises:
            ValueError: There is no section, or the length of its schedule is not known.
        """
        return sent_section(self, role)

    def sent_spec(self, role: str) -> dict[str, Any]:
        """The section of `sent_section` as it travels."""
        return to_sent(self.sent_section(role))

    @model_validator(mode="after")
    def _check_schedules(self) -> Self:
        for role in self.roles:
            self.sent_section(role)
        return self

    @model_validator(mode="after")
    def _check_tuning(self) -> Self:
        check_tuning(self)
        return self

    def own_functions(self) -> Mapping[str, OwnFunctionSpec]:
        """The user's functions that the actor loads, by the field that names each."""
        named = {} if self.actor is None else self.actor.own_functions
        if isinstance(self.algorithm, AlgorithmSection):
            return {**named, **self.algorithm.own_functions}
        return named

    def layout(self, role: str) -> TrainLayout:
        """How the role's model is spread over the ranks of each of its services."""
        return self.section(role).rank_layout().train

    def pool_of(self, role: str) -> PoolSpec:
        """The devices of a role, and the roles that share them."""
        return self.pools[self.pool_name(role)]

    def pool_name(self, role: str) -> str:
        """The key of a role's pool."""
        return next(name for name, pool in self.pools.items() if role in pool.roles)

    def has_model(self, role: str) -> bool:
        """Whether a role computes with a model, unlike what compares, or asks outside.

        Example: the quickstart's reward, which reads numbers, has none.
        """
        section = self.section(role)
        if isinstance(section, OneTeacherSpec):
            return section.model is not None
        source = getattr(section, "source", None)
        if source is None:
            return True
        return any(isinstance(one.source, ClassifierRewardSpec) for one in named_sources(source))

    def wants_gpu(self, role: str) -> bool:
        """Whether a role has a model, and its pool names GPUs for it."""
        return self.has_model(role) and self.pool_of(role).has_gpus

    def layouts_in(self, pool: str) -> dict[str, str]:
        """Layout p-t-d of each role of a pool, as people read it."""
        roles = (role for role in self.pools[pool].roles if role in self.roles)
        return {role: self.layout(role).described() for role in roles}

    def service(self, role: str) -> ServiceSpec:
        """Where the role's services are."""
        return self.services.get(role, ServiceSpec())

    def services_of(self, role: str) -> tuple[str, ...]:
        """Names of the role's services; of one whose services change, all that there can be."""
        spec = self.service(role)
        return service_names(role, max(spec.most_replicas or spec.replicas, len(spec.addresses)))

    def changes(self, role: str) -> bool:
        """Whether services of the role may join the run and leave it."""
        return self.service(role).most_replicas is not None

    def sleeps(self, service: str) -> bool:
        """Whether a service leaves its devices to other roles of its pool."""
        pools = self.pools.values()
        return any(pool.lets_roles_sleep for pool in pools if role_of(service) in pool.roles)

    def address(self, service: str) -> str | None:
        """Where a service runs already; REGISTERED: it will say so; None: it is started here."""
        role = role_of(service)
        spec = self.service(role)
        if spec.addresses:
            return spec.addresses[self.services_of(role).index(service)]
        return REGISTERED if spec.registers else spec.address
