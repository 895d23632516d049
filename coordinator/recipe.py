"""The recipe: everything that describes a run, in one validated tree.

The sections of the roles are the engine's own specs, so that a service validates what it
receives with the class that validated the recipe. Loading, overrides and suggestions are in
`recipe_loading`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rolemesh.engine.layout import TrainLayout
from rolemesh.engine.specs import (
    ActorSpec,
    CriticSpec,
    GaeSpec,
    PpoPolicyLossSpec,
    PpoValueLossSpec,
    ReferenceSpec,
    RewardSpec,
    SamplingSpec,
    Spec,
)

ROLES = ("actor", "critic", "reference", "reward")


class EvaluationSpec(Spec):
    """Held-out evaluation before and after training, and in between."""

    every_steps: int = Field(default=0, ge=0)
    """Evaluate after every so many steps; 0 evaluates only before the first and after the last."""
    num_prompts: int = Field(default=128, ge=0)
    """Held-out prompts, sampled greedily; 0 switches evaluation off."""


class CheckpointSpec(Spec):
    """When checkpoints are written."""

    every_steps: int = Field(default=0, ge=0)
    """Write one after every so many steps; 0 writes only the last one."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""


class RunSpec(Spec):
    """The run as a whole."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")
    """Short name, lower case."""
    seed: int = Field(default=0, ge=0, lt=2**53)
    """Every random choice derives from it."""
    steps: int = Field(ge=1)
    """RL iterations."""
    prompts_per_step: int = Field(ge=1)
    """Prompts in one iteration."""
    directory: Path | None = None
    """Where the run's files go; None: runs/<name>-<time>."""
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()


class PpoSpec(Spec):
    """Proximal policy optimisation with a critic (arXiv 1707.06347)."""

    type: Literal["ppo"] = "ppo"
    sampling: SamplingSpec = SamplingSpec()
    advantages: GaeSpec = GaeSpec()
    policy_loss: PpoPolicyLossSpec = PpoPolicyLossSpec()
    value_loss: PpoValueLossSpec = PpoValueLossSpec()
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's experience."""
    mini_batch_rows: int = Field(default=64, ge=1)
    """Trajectories of one optimizer step."""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        if self.policy_loss.temperature != self.sampling.temperature:
            raise ValueError(
                f"policy_loss.temperature is {self.policy_loss.temperature} but "
                f"sampling.temperature is {self.sampling.temperature}: give both the same value, "
                "or the ratio compares two different distributions"
            )
        if self.sampling.top_p != 1.0 or self.sampling.top_k != -1:
            raise ValueError(
                f"sampling.top_p is {self.sampling.top_p} and sampling.top_k is "
                f"{self.sampling.top_k}: training needs 1.0 and -1; the sampler's log-probs would "
                "be those of a cut distribution, and the trainer's those of the whole one"
            )
        return self


AlgorithmSpec = Annotated[PpoSpec, Field()]
"""Becomes a union discriminated on `type` with the second algorithm."""


class PoolSpec(Spec):
    """A named set of devices. Its roles take turns; pools run side by side."""

    devices: tuple[str, ...] = ("cpu",)
    """Devices, e.g. ["cpu"] or ["cuda:0", "cuda:1"]."""
    roles: tuple[str, ...] = Field(min_length=1)
    """Roles that share the devices."""


class ServiceSpec(Spec):
    """Where a role's service is."""

    address: str | None = Field(default=None, pattern=r"^[^:\s]+:\d{1,5}$")
    """host:port of a service that runs already; None: the coordinator starts one on loopback."""
    threads: int | None = Field(default=None, ge=1)
    """Compute threads of each rank that the coordinator starts; None: every core."""
    experience_capacity_mib: int = Field(default=1024, ge=1)
    """Bound on the experience that each rank of a started service holds, in MiB."""


class EmbeddedStoreSpec(Spec):
    """A Valkey server started with the run, keeping its data in the run's folder."""

    type: Literal["embedded"] = "embedded"


class RedisStoreSpec(Spec):
    """Any Redis or Valkey server."""

    type: Literal["redis"] = "redis"
    url: str = Field(pattern=r"^(redis|rediss|unix)://")
    """e.g. redis://127.0.0.1:6379/0"""


class MemoryStoreSpec(Spec):
    """Nothing outlives the process: for unit tests."""

    type: Literal["memory"] = "memory"


StoreSpec = Annotated[
    EmbeddedStoreSpec | RedisStoreSpec | MemoryStoreSpec, Field(discriminator="type")
]


class Recipe(Spec):
    """A run: what to train, on what, how, and where."""

    run: RunSpec
    algorithm: AlgorithmSpec
    actor: ActorSpec
    critic: CriticSpec
    reference: ReferenceSpec
    reward: RewardSpec
    pools: dict[str, PoolSpec] = Field(
        default_factory=lambda: {"main": PoolSpec(devices=("cpu",), roles=ROLES)}
    )
    """Device sets and the roles that share them. Every role stands in exactly one."""
    services: dict[str, ServiceSpec] = Field(default_factory=dict)
    """Where each role's service is; roles that are left out are started on loopback."""
    store: StoreSpec = EmbeddedStoreSpec()

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        for role in self.services:
            if role not in ROLES:
                raise ValueError(f"services.{role}: no such role; roles are {', '.join(ROLES)}")
        placed = [role for pool in self.pools.values() for role in pool.roles]
        for role in ROLES:
            if placed.count(role) != 1:
                raise ValueError(
                    f"pools: role {role!r} stands in {placed.count(role)} pools; "
                    "it must stand in exactly one"
                )
        for role in placed:
            if role not in ROLES:
                raise ValueError(f"pools: no role {role!r}; roles are {', '.join(ROLES)}")
        return self

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        for name, pool in self.pools.items():
            num_gpus = sum(device.startswith("cuda") for device in pool.devices)
            for role in pool.roles:
                num_ranks = self.layout(role).world_size
                if 0 < num_gpus < num_ranks:
                    raise ValueError(
                        f"pools.{name}.devices has {num_gpus} GPUs, but the layout of the {role} "
                        f"has {num_ranks} ranks, each on a GPU of its own: give the pool more "
                        "devices, or the role a smaller layout"
                    )
        return self

    def layout(self, role: str) -> TrainLayout:
        """How the role's model is spread over the ranks of its service."""
        section: ActorSpec | CriticSpec | ReferenceSpec | RewardSpec = getattr(self, role)
        return section.rank_layout().train

    def service(self, role: str) -> ServiceSpec:
        """Where the role's service is."""
        return self.services.get(role, ServiceSpec())
