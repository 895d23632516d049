"""Bodies of small requests. Fields that clients of a later version add are ignored where harmless.

What sizes a body is bounded by the server; gradients and samples have forms of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from rolemesh.coordinator.tinker.forms.forms import WireError
from rolemesh.coordinator.tinker.shapes import ModelShape
from rolemesh.coordinator.tinker.store import Kind
from rolemesh.engine.specs.losses.traced_losses import MOST_INPUTS, MOST_NODES

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")

_SAVED: Mapping[Kind, str] = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}
"""Types of answers."""

Name = Annotated[str, Field(min_length=1, max_length=256)]
Metadata = dict[Annotated[str, Field(max_length=256)], Annotated[str, Field(max_length=4096)]]
SeqId = Annotated[int, Field(ge=0, lt=2**63)]


class Body(BaseModel):
    """A request."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False)


class LoraConfig(Body):
    """What a client chooses of its adapter. The head is not trained, whatever train_unembed is."""

    rank: int = Field(ge=0)
    seed: int | None = Field(default=None, ge=0, lt=2**53)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def shape(self, most_rank: int) -> ModelShape:
        """What it asks for; raises WireError where this server does not have that.

        Args:
            most_rank: Largest rank that is served; 0: whole models are.
        """
        if not most_rank:
            if self.rank:
                raise WireError(
                    "lora_config.rank", self.rank, "this server trains whole models: give 0"
                )
            return ModelShape(rank=0, seed=0)
        if not self.rank:
            raise WireError(
                "lora_config.rank",
                0,
                "this server trains adapters: give 1 or more, or start it with --whole",
            )
        if self.rank > most_rank:
            raise WireError("lora_config.rank", self.rank, f"this server takes {most_rank} at most")
        targets = (*(_ATTENTION if self.train_attn else ()), *(_MLP if self.train_mlp else ()))
        if not targets:
            raise WireError(
                "lora_config", "train_attn and train_mlp are false", "one of them must be true"
            )
        return ModelShape(
            rank=self.rank,
            seed=self.seed or 0,
            targets=None if self.train_attn and self.train_mlp else targets,
        )


class NewModel(Body):
    """What a client may say of a model, however it begins."""

    user_metadata: Metadata | None = None
    optimizer_config: Mapping[str, Any] | None = None

    @model_validator(mode="after")
    def _check_optimizer(self) -> NewModel:
        kind = (self.optimizer_config or {}).get("type", "adamw")
        if kind != "adamw":
            raise ValueError(f"optimizer_config.type is {kind!r}: adamw is served")
        return self


class CreateModel(NewModel):
    """Asks for a new model."""

    session_id: Name
    model_seq_id: SeqId
    base_model: Name
    lora_config: LoraConfig


class AdamParams(Body):
    """Numbers of one step."""

    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, ge=0)

    def numbers(self) -> dict[str, float]:
        """Those beside the rate, as a service takes them."""
        return {
            "beta1": self.beta1,
            "beta2": self.beta2,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "max_grad_norm": self.grad_clip_norm,
        }


class OptimStep(Body):
    """Asks for a step of the optimizer."""

    model_id: Name
    seq_id: SeqId = 0
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> OptimStep:
        kind = (self.optimizer_params or {}).get("type", "adamw")
        if kind not in ("adamw", "adam"):
            raise ValueError(f"optimizer_params.type is {kind!r}: adamw is served")
        return self

    @property
    def params(self) -> AdamParams:
        """The numbers, in whichever field they came."""
        if self.adam_params is not None:
            return self.adam_params
        return AdamParams.model_validate(self.optimizer_params or {})


class CreateSession(Body):
    """Asks for a session."""

    user_metadata: Metadata | None = None
    display_name: Name | None = None
    project_id: Name | None = None


class Finish(Body):
    """Ends a session."""

    class Reason(Body):
        """How it ended."""

        type: Literal["success", "errored", "interrupted"]

    reason: Reason | None = None
    detail: str | None = Field(default=None, max_length=4096)


class ToProject(Body):
    """Gives a session a label."""

    project_id: Name


class SearchSessions(Body):
    """Looks for sessions of one owner."""

    class Status(Body):
        """One that is looked for."""

        type: str
        reasons: list[str] | None = None

    class Cursor(Body):
        """Where the page begins."""

        last_created_at: AwareDatetime
        last_session_id: Name

    session_id: Name | None = None
    project_ids: list[Name] | None = None
    user_metadata: Metadata = Field(default_factory=dict)
    display_name: Name | None = None
    statuses: list[Status] | None = None
    limit: int = Field(default=50, ge=1, le=200)
    cursor: Cursor | None = None


class CopyWeights(Body):
    """Asks that another run has the same weights."""

    source_path: Name
    session_id: Name | None = None
    model_seq_id: SeqId | None = None
    destination_project_id: Name | None = None
    ttl_seconds: float | None = Field(default=None, gt=0)
    weights_access_token: Name | None = None

    @model_validator(mode="after")
    def _check_place(self) -> CopyWeights:
        has_session = self.session_id is not None and self.model_seq_id is not None
        if has_session == (self.destination_project_id is not None):
            raise ValueError("give destination_project_id, or session_id and model_seq_id")
        return self


class CreateCustomLoss(Body):
    """Brings a loss as a graph of known operations; `TracedLossSpec` says what it may be."""

    class Graph(Body):
        """Its nodes."""

        format: Literal[1] = 1
        nodes: list[dict[str, Any]] = Field(max_length=MOST_NODES)

    session_id: Name
    custom_loss_seq_id: SeqId
    name: Name
    inputs: list[dict[str, Any]] = Field(max_length=MOST_INPUTS)
    graph: Graph


class SaveWeights(Body):
    """Asks to save a model's weights."""

    model_id: Name
    path: Name | None = None
    seq_id: SeqId = 0
    ttl_seconds: float | None = Field(default=None, gt=0)
    overwrite: bool = False
    user_metadata: Metadata | None = None
    sampling_session_seq_id: SeqId | None = None
    age_encryption_recipients: list[str] | None = None
    kind_of_weights: Kind = Field(default="weights", exclude=True)
    """Set by the server."""

    @model_validator(mode="after")
    def _check_name(self) -> SaveWeights:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("give path or sampling_session_seq_id, and one of the two")
        if self.age_encryption_recipients:
            raise ValueError(
                "age_encryption_recipients: files are not encrypted here: leave it out"
            )
        return self

    @property
    def answer_type(self) -> str:
        """The type of the answer."""
        return _SAVED[self.kind_of_weights]


class LoadWeights(NewModel):
    """Asks for a model with saved weights."""

    path: Name
    optimizer: bool = False
    model_id: Name | None = None
    session_id: Name | None = None
    model_seq_id: SeqId | None = None
    seq_id: SeqId = 0
    weights_access_token: Name | None = None

    @model_validator(mode="after")
    def _check_model(self) -> LoadWeights:
        has_session = self.session_id is not None and self.model_seq_id is not None
        if (self.model_id is None) != has_session:
            raise ValueError("give model_id, or session_id and model_seq_id")
        return self


class CreateSampler(Body):
    """Asks for a sampling session."""

    session_id: Name
    sampling_session_seq_id: SeqId
    base_model: Name | None = None
    model_path: Name | None = None


class OfModel(Body):
    """Names a model."""

    model_id: Name


class OfSession(Body):
    """Names a session."""

    session_id: Name


class OfPath(Body):
    """Names saved weights."""

    tinker_path: Name


class OfPromise(Body):
    """Asks for a result."""

    request_id: Name
    allow_metadata_only: bool = False


class OfSampler(Body):
    """Names a sampling session."""

    sampling_session_id: Name


class SampledTogether(Body):
    """Asks which samples of one copy of a sampling client have ended."""

    class Target(OfSampler):
        """Which samples."""

        cloned_sampler_id: SeqId = 0

    target: Target
    prev_cursor: SeqId = 0
    timeout: float | None = Field(default=None, ge=0)
    retrieved_request_ids: list[Name] = Field(default_factory=list, max_length=20_000)


class Ttl(Body):
    """Says how long weights are kept."""

    ttl_seconds: float | None = Field(default=None, gt=0)
