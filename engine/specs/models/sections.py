"""Models, optimizers, and how they are spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rolemesh.engine.layout.ranks import GenerateLayout, RankOrder, TrainLayout
from rolemesh.engine.specs.base import Spec
from rolemesh.engine.specs.models.adapters import AdapterSpec
from rolemesh.engine.specs.models.rates import ConstantRateSpec, DecaySpec, RateScheduleSpec

ComputeDtype = Literal["float32", "bfloat16"]
GgufType = Literal["f32", "f16", "bf16", "q8_0"]
"""Type of the matrices of a GGUF file; its vectors are float32, as llama.cpp computes with them."""

Numerics = Literal["exact", "fast"]
"""exact: log-probs of trainer and sampler agree as far as the device allows. fast: bfloat16 from
end to end, and importance weights against the difference."""


class BiasBalancingSpec(Spec):
    """Evens the loads of experts out by a bias, without a term in the loss (arXiv 2408.15664)."""

    type: Literal["bias"] = "bias"
    rate: float = Field(default=1e-3, gt=0)
    """What the bias of an expert grows by after an optimizer step in which fewer completion tokens
    than the mean chose it; it falls by as much where more did."""


class ModelSpec(Spec):
    """A Hugging Face model folder and how to compute with it."""

    path: Path
    """Folder with config.json, tokenizer and safetensors. In a recipe also hf:ORG/NAME or
    hf:ORG/NAME@REVISION, a model of the Hugging Face hub, which the command line fetches; services
    never download anything."""
    compute_dtype: ComputeDtype = "bfloat16"
    """Type of matrix products. Weights and optimizer state stay float32. With numerics "exact",
    bfloat16 is autocast, except for policy and reference on a CPU: there each pass rounds the
    weights and keeps activations float32, so that log-probs agree with the sampler's; backward
    products are bfloat16. With "fast", activations are bfloat16 too. A CPU without instructions for
    bfloat16 multiplies the rounded weights as float32, in every model and pass."""
    activations: ComputeDtype | None = None
    """Type of hidden states between layers. None: float32 with numerics "exact", and on a CPU
    without bfloat16 instructions; else the compute_dtype."""
    adapter: AdapterSpec | None = None
    """Small tensors that are trained in place of the model, which stays as it is. None trains all
    of it."""
    balancing: BiasBalancingSpec | None = None
    """How a mixture whose router has a bias of experts (GLM4-MoE) keeps their loads even while it
    is trained. None leaves the bias as it is."""
    num_layers: int | None = Field(default=None, ge=1)
    """Keep only the first layers (a cheaper critic). None keeps all."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Activations computed again in the backward pass: none, attention only, whole layers. None:
    whole layers on a GPU where a micro-batch would keep more of them than half of what the GPU has
    left beside weights, gradients and moments; else none."""
    sequence_parallel: bool = False
    """Whether tensor slices (tp of the layout) share the tokens between attention and MLP, so that
    norms and the residual stream take as many times less memory as there are slices. As much is
    sent as without."""
    frozen_dtype: ComputeDtype | None = None
    """Type of weights that are not trained: of a reference or reward, or beneath an adapter. None:
    bfloat16 where compute_dtype is and the device is a GPU or numerics "fast", else float32."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Most tokens in one forward pass; what rows share counts once. Models that take no packed rows
    are padded, and padding counts."""
    share_prefixes: Literal["auto", "never"] = "auto"
    """Whether what rows begin with alike (a prompt, a template, earlier turns) is computed once, in
    passes in which that saves. It changes memory and time; numbers change as they do with other
    micro-batches."""
    logprob_chunk_tokens: int | None = Field(default=None, ge=1)
    """Rows of the vocabulary projection computed at a time, and kept for the backward pass: bounds
    the largest temporary. None takes 512 on a CPU, which keeps as many as make 512 MiB of float32
    logits, and on a GPU as many as make 1 GiB."""


class ScheduledSpec(Spec):
    """The base of optimizers: a schedule of the learning rate, decay, and gradient clipping."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Learning rate after the warm-up, from which a schedule falls."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    schedule: RateScheduleSpec = ConstantRateSpec()
    """How the learning rate falls after the warm-up: constant, linear or cosine. What counts are
    optimizer steps whose effect is in the weights."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay; not applied to vectors (norms, biases)."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger global L2 norm are scaled down to it."""
    offload: bool = False
    """Keep the optimizer's moments in pinned host memory between steps. On a CPU device they are
    there anyway."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        schedule = self.schedule
        if not isinstance(schedule, DecaySpec):
            return self
        if schedule.min_learning_rate >= self.learning_rate:
            raise ValueError(
                f"schedule.min_learning_rate is {schedule.min_learning_rate:g}, but learning_rate, "
                f"from which it falls, is {self.learning_rate:g}: give less"
            )
        if schedule.optimizer_steps is not None and schedule.optimizer_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule.optimizer_steps is {schedule.optimizer_steps} and warmup_steps is "
                f"{self.warmup_steps}, so that nothing is left of the decay: give fewer "
                "warmup_steps, or a longer schedule"
            )
        return self


class AdamwMomentsSpec(Spec):
    """What AdamW has beside rate and decay."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and of the second moment of AdamW."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of AdamW's step."""


class AdamwStepSpec(Spec):
    """What one step of AdamW goes by, beside its rate."""

    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]
    """Decay of the first and of the second moment."""
    eps: float = Field(ge=0, allow_inf_nan=False)
    """Added to the denominator."""
    weight_decay: float = Field(ge=0, allow_inf_nan=False)
    """Decoupled decay; not applied to vectors."""
    max_grad_norm: float | None = Field(gt=0)
    """Gradients with a larger global L2 norm are scaled down to it; None: none are."""


class OptimizerSpec(AdamwMomentsSpec, ScheduledSpec):
    """AdamW for all weights: what an optimizer is that names no type."""

    type: Literal["adamw"] = "adamw"


class MuonSpec(ScheduledSpec):
    """Muon for the matrices of the layers, AdamW for all else.

    The rate is that of AdamW: a matrix's step has about the size that AdamW's would have
    (arXiv 2502.16982, eq. 4).
    """

    type: Literal["muon"] = "muon"
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of gradients that is orthogonalised."""
    nesterov: bool = True
    """Whether the newest gradient counts once more in what is orthogonalised."""
    ns_steps: int = Field(default=5, ge=1, le=20)
    """Iterations of Newton-Schulz: fewer take less time, and leave singular values less equal."""
    adamw: AdamwMomentsSpec = AdamwMomentsSpec()
    """Of the AdamW that trains what is no matrix of a layer: embedding, head, norms, biases."""


_ONLY_FOR = {
    **dict.fromkeys(("betas", "eps"), "adamw"),
    **dict.fromkeys(("momentum", "nesterov", "ns_steps", "adamw"), "muon"),
}
"""The type of optimizer to which a field belongs that not all have."""


def _chosen_optimizer(given: Any) -> Any:
    """Takes AdamW where no type is given, and says what is wrong with types and their fields."""
    if not isinstance(given, Mapping):
        return given
    kind = given.get("type", "adamw")
    if isinstance(kind, str) and "8bit" in kind.lower().replace("-", "").replace("_", ""):
        raise ValueError(
            f"type is {kind!r}: moments in 8 bits share a scale in blocks of what a rank "
            "holds, so that another layout could not go on with the same numbers; to save memory "
            "give type muon (one moment for a matrix), offload: true, or cut the weights over more "
            "ranks (fsdp)"
        )
    for name in given:
        owner = _ONLY_FOR.get(name, kind)
        if kind in ("adamw", "muon") and owner != kind:
            remedy = f"adamw.{name}, for what is no matrix" if kind == "muon" else "type: muon"
            raise ValueError(
                f"{name} is given, but type is {kind!r}, which has no such setting: leave it out, "
                f"or give {remedy}"
            )
    return {"type": "adamw", **given}


AnyOptimizerSpec = Annotated[
    OptimizerSpec | MuonSpec, Field(discriminator="type"), BeforeValidator(_chosen_optimizer)
]
"""An optimizer, by type."""


def check_optimizer(optimizer: ScheduledSpec | None, model: ModelSpec) -> None:
    """Refuses Muon where there is nothing for it.

    Raises:
        ValueError: Names the fields.
    """
    if isinstance(optimizer, MuonSpec) and model.adapter is not None:
        raise ValueError(
            "optimizer.type is 'muon', but model.adapter is given, whose factors are no matrices "
            "of the model: orthogonalising each of them does not orthogonalise their product, by "
            "which the weights change; leave the type out (AdamW), or the adapter"
        )


class LayoutSpec(Spec):
    """How a model is spread over the ranks of its service; their number is pp * tp * dp."""

    pp: int = Field(default=1, ge=1)
    """Pipeline stages: runs of layers, each on other ranks."""
    tp: int = Field(default=1, ge=1)
    """Tensor slices: each matrix is cut over so many ranks."""
    dp: int = Field(default=1, ge=1)
    """Data-parallel replicas: each computes its share of the rows."""
    fsdp: int | None = Field(default=None, ge=1)
    """Data-parallel ranks that cut each parameter among them: 1 replicates, dp cuts over all.
    None cuts over all."""
    ep: int = Field(default=1, ge=1)
    """Data-parallel ranks that share the experts of a mixture out, each computing its own for the
    rows of all."""
    cp: int = Field(default=1, ge=1)
    """Data-parallel ranks that take the same rows and of each packed row an even part, with heads
    for tokens around attention (Ulysses); dp / cp replicas share the rows out."""
    order: RankOrder = "tp-pp-dp"
    """How ranks are numbered, fastest coordinate first."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        self.layout()
        return self

    def layout(self) -> TrainLayout:
        """The layout as rank arithmetic."""
        fsdp = self.dp if self.fsdp is None else self.fsdp
        return TrainLayout(
            pp=self.pp,
            tp=self.tp,
            dp=self.dp,
            fsdp=fsdp,
            ep=self.ep,
            cp=self.cp,
            order=self.order,
        )


class GenerateSpec(Spec):
    """How generation is spread over the ranks that train."""

    pp: int = Field(default=1, ge=1)
    """Pipeline stages; divides those of training."""
    tp: int = Field(default=1, ge=1)
    """Tensor slices; divides those of training."""

    def layout(self) -> GenerateLayout:
        """The layout as rank arithmetic."""
        return GenerateLayout(pp=self.pp, tp=self.tp)
