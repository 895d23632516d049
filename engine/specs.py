"""What a run may ask of the engine: frozen, validated, and free of torch.

One schema serves both ends. A recipe is made of these specs, and a service validates the
section it receives with the same class. Unknown keys are refused. Numbers state their unit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rolemesh.engine.layout import GenerateLayout, HybridLayout, RankOrder, TrainLayout

ComputeDtype = Literal["float32", "bfloat16"]


class Spec(BaseModel):
    """A frozen section of a recipe that refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


# --- models -------------------------------------------------------------------------------


class ModelSpec(Spec):
    """A Hugging Face model folder and how to compute with it."""

    path: Path
    """Folder with config.json, tokenizer and safetensors. Nothing is ever downloaded."""
    compute_dtype: ComputeDtype = "bfloat16"
    """Type of matrix products. Weights and optimizer state stay float32. bfloat16 is autocast,
    except for policy and reference on a CPU: there each pass rounds the weights and keeps
    activations float32, so that log-probs agree with the sampler's; backward products are bfloat16.
    """
    num_layers: int | None = Field(default=None, ge=1)
    """Keep only the first layers (a cheaper critic). None keeps all."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, attention only, whole layers."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Most tokens, padding included, in one forward pass."""
    logprob_chunk_tokens: int = Field(default=512, ge=1)
    """Rows of the vocabulary projection computed at a time: bounds the largest logits."""


class OptimizerSpec(Spec):
    """AdamW with warm-up and gradient clipping."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of linear warm-up from 0."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of first and second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay; not applied to vectors (norms, biases)."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger global L2 norm are scaled down to it."""
    offload: bool = False
    """Keep the optimizer's moments in pinned host memory between steps. On a CPU device they are
    there anyway."""


# --- layouts ------------------------------------------------------------------------------


class LayoutSpec(Spec):
    """How a model is spread over the ranks of its service; their number is pp * tp * dp."""

    pp: int = Field(default=1, ge=1)
    """Pipeline stages."""
    tp: int = Field(default=1, ge=1)
    """Tensor slices."""
    dp: int = Field(default=1, ge=1)
    """Data-parallel replicas."""
    fsdp: int | None = Field(default=None, ge=1)
    """Data-parallel ranks that cut each parameter among them: 1 replicates, dp cuts over all.
    None cuts over all."""
    order: RankOrder = "tp-pp-dp"
    """How ranks are numbered, fastest coordinate first."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        self.layout()
        return self

    def layout(self) -> TrainLayout:
        """The layout as rank arithmetic."""
        fsdp = self.dp if self.fsdp is None else self.fsdp
        return TrainLayout(pp=self.pp, tp=self.tp, dp=self.dp, fsdp=fsdp, order=self.order)


class GenerateSpec(Spec):
    """How generation is spread over the ranks that train."""

    pp: int = Field(default=1, ge=1)
    """Pipeline stages; divides those of training."""
    tp: int = Field(default=1, ge=1)
    """Tensor slices; divides those of training."""

    def layout(self) -> GenerateLayout:
        """The layout as rank arithmetic."""
        return GenerateLayout(pp=self.pp, tp=self.tp)


# --- sampling -----------------------------------------------------------------------------


class SamplingSpec(Spec):
    """How completions are drawn."""

    samples_per_prompt: int = Field(default=1, ge=1)
    """Completions a prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature; not used when greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass."""
    top_k: int = Field(default=-1)
    """Tokens kept; -1 keeps all."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Longest completion, in tokens."""
    greedy: bool = False
    """Take the likeliest token each time."""

    @model_validator(mode="after")
    def _check_top_k(self) -> Self:
        if self.top_k == 0 or self.top_k < -1:
            raise ValueError(f"top_k is {self.top_k}: give a positive number, or -1 for all tokens")
        return self


class VllmSpec(Spec):
    """Rollout with vLLM in the actor's own process."""

    type: Literal["vllm"] = "vllm"
    max_model_len: int = Field(default=512, ge=2)
    """Longest prompt and completion together, in tokens."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences decoded together."""
    kv_cache_gib: int = Field(default=1, ge=1)
    """KV cache on a CPU device, in whole GiB."""
    gpu_memory_utilization: float = Field(default=0.4, gt=0, lt=1)
    """Share of a GPU's memory for weights and KV cache of the sampler."""
    dtype: ComputeDtype = "bfloat16"
    """Type that weights travel in and are rounded to; on a GPU that of activations too. On a CPU
    the sampler computes with those values in float32, and holds weights and keys in float32."""
    enforce_eager: bool = True
    """Skip graph capture; on a CPU it only costs start-up time."""


class HfSpec(Spec):
    """Rollout with plain transformers: small, slow, the oracle."""

    type: Literal["hf"] = "hf"
    max_model_len: int = Field(default=512, ge=2)
    """Longest prompt and completion together, in tokens."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences decoded together."""
    dtype: ComputeDtype = "float32"
    """Type of weights and activations in the sampler."""


RolloutSpec = Annotated[VllmSpec | HfSpec, Field(discriminator="type")]


# --- data ---------------------------------------------------------------------------------


class ReasoningGymSpec(Spec):
    """Prompts from a reasoning-gym task, made on the spot and verifiable."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str
    """Registered name of the task, e.g. "chain_sum"."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the task's config class."""
    train_size: int = Field(default=4096, ge=0)
    """Training prompts."""
    held_out_size: int = Field(default=128, ge=0)
    """Held-out prompts, never equal to a training prompt."""
    seed: int = Field(default=0, ge=0)
    """Seed of the task's generator."""
    question_template: str = "{question}"
    """Text of the user turn; `{question}` is replaced, and so are keys of the row's metadata."""
    system_prompt: str | None = None
    """Text of the system turn; None leaves the turn out."""
    assistant_prefix: str = ""
    """Text that the assistant's turn already begins with, filled like question_template."""


class JsonlSpec(Spec):
    """Prompts from JSON lines with the keys prompt (text or messages) and, optionally, answer."""

    type: Literal["jsonl"] = "jsonl"
    path: Path
    """File with the training prompts."""
    held_out_path: Path | None = None
    """File with the held-out prompts."""
    system_prompt: str | None = None
    """Text of the system turn for plain-text prompts; None leaves the turn out."""
    assistant_prefix: str = ""
    """Text that the assistant's turn already begins with, e.g. "<think>"."""


DataSpec = Annotated[ReasoningGymSpec | JsonlSpec, Field(discriminator="type")]


# --- algorithm parts ----------------------------------------------------------------------


class FixedKlSpec(Spec):
    """A constant KL coefficient."""

    type: Literal["fixed"] = "fixed"
    coefficient: float = Field(default=0.05, ge=0)
    """Weight of the KL term."""


class AdaptiveKlSpec(Spec):
    """The proportional controller of Ziegler et al. (arXiv 1909.08593, section 2.2)."""

    type: Literal["adaptive"] = "adaptive"
    coefficient: float = Field(default=0.05, gt=0)
    """Weight of the KL term at the start."""
    target: float = Field(default=6.0, gt=0)
    """KL per trajectory to hold, in nats."""
    horizon: int = Field(default=10_000, ge=1)
    """Trajectories over which the coefficient may change by a fifth."""


KlControllerSpec = Annotated[FixedKlSpec | AdaptiveKlSpec, Field(discriminator="type")]
KlForm = Literal["k1", "k2", "k3"]


class GaeSpec(Spec):
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) over completion tokens."""

    type: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount a token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """Trace decay a token."""
    whiten: bool = True
    """Shift and scale advantages to mean 0 and variance 1 over all unmasked tokens."""
    kl_in_reward: KlControllerSpec | None = None
    """Penalise the reward of each token by coefficient * KL; None leaves rewards alone."""
    kl_form: KlForm = "k1"
    """Estimator of the KL in the reward."""


EstimatorSpec = GaeSpec

Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_sum_norm"]


class AggregatedLossSpec(Spec):
    """What losses over tokens share: how they become one number."""

    aggregation: Aggregation = "token_mean"
    """How token losses become one number."""
    norm_length: int | None = Field(default=None, ge=1)
    """Constant divisor a row for seq_sum_norm, in tokens (arXiv 2503.20783)."""

    @model_validator(mode="after")
    def _check_norm_length(self) -> Self:
        if (self.aggregation == "seq_sum_norm") != (self.norm_length is not None):
            raise ValueError(
                f"norm_length is {self.norm_length} with aggregation {self.aggregation!r}: "
                "give norm_length with seq_sum_norm, and only then"
            )
        return self


class PpoPolicyLossSpec(AggregatedLossSpec):
    """Clipped policy loss (arXiv 1707.06347, eq. 7), asymmetric and dual clip as options."""

    type: Literal["ppo_policy"] = "ppo_policy"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound c of arXiv 1912.09729, eq. 5, for negative advantages; None switches it off."""
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of an entropy bonus."""
    kl_in_loss: float = Field(default=0.0, ge=0)
    """Weight of a KL term to the reference in the loss."""
    kl_form: KlForm = "k3"
    """Estimator of the KL in the loss."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature at which log-probs are taken: that of sampling."""


class PpoValueLossSpec(AggregatedLossSpec):
    """Clipped squared error of values (PPO as in arXiv 2006.05990, section 3.1)."""

    type: Literal["ppo_value"] = "ppo_value"
    clip: float | None = Field(default=0.2, gt=0)
    """Values may move this far from the old ones; None switches clipping off."""


LossSpec = Annotated[PpoPolicyLossSpec | PpoValueLossSpec, Field(discriminator="type")]


# --- rewards ------------------------------------------------------------------------------


class ArithmeticRewardSpec(Spec):
    """Graded reward of verifiable arithmetic: how close a completion is to the bare number."""

    type: Literal["arithmetic"] = "arithmetic"
    exact: float = 1.0
    """The completion is the answer and nothing else."""
    contained: float = Field(default=0.2, ge=0)
    """Most that a right last number with other text around it can earn; text shrinks it."""
    form: float = Field(default=0.1, ge=0)
    """A bare number, but a wrong one."""


class ReasoningGymRewardSpec(Spec):
    """The task's own scorer (reasoning-gym's score_answer), 0 to 1."""

    type: Literal["reasoning_gym"] = "reasoning_gym"


class ClassifierRewardSpec(Spec):
    """A Hugging Face sequence classifier: the reward is a logit of its head."""

    type: Literal["classifier"] = "classifier"
    model: ModelSpec
    """Folder of an AutoModelForSequenceClassification and its tokenizer."""
    label: int = Field(default=0, ge=0)
    """Index of the logit that is the reward."""


RewardSourceSpec = Annotated[
    ArithmeticRewardSpec | ReasoningGymRewardSpec | ClassifierRewardSpec,
    Field(discriminator="type"),
]


# --- roles --------------------------------------------------------------------------------


class RoleSpec(Spec):
    """A role's section of a recipe."""

    def rank_layout(self) -> HybridLayout:
        """How the role's ranks stand to each other; one rank unless a role says otherwise."""
        return HybridLayout(TrainLayout())


class ActorSpec(RoleSpec):
    """The actor: trains the policy and rolls it out."""

    model: ModelSpec
    optimizer: OptimizerSpec = OptimizerSpec()
    rollout: RolloutSpec
    data: DataSpec
    train: LayoutSpec = LayoutSpec()
    """Layout of training and scoring."""
    generate: GenerateSpec = GenerateSpec()
    """Layout of generation, on the same ranks."""

    @model_validator(mode="after")
    def _check_layouts(self) -> Self:
        self.rank_layout()
        return self

    def rank_layout(self) -> HybridLayout:
        """Both layouts as rank arithmetic."""
        return HybridLayout(self.train.layout(), self.generate.layout())


class CriticSpec(RoleSpec):
    """The critic: a value head on a language model."""

    model: ModelSpec
    optimizer: OptimizerSpec = OptimizerSpec(learning_rate=1e-5)
    train: LayoutSpec = LayoutSpec()
    """Layout of training and scoring."""

    def rank_layout(self) -> HybridLayout:
        """The layout as rank arithmetic."""
        return HybridLayout(self.train.layout())


class ReferenceSpec(RoleSpec):
    """The frozen reference policy."""

    model: ModelSpec
    layout: LayoutSpec = LayoutSpec()
    """How the model is spread over ranks."""

    def rank_layout(self) -> HybridLayout:
        """The layout as rank arithmetic."""
        return HybridLayout(self.layout.layout())


class RewardSpec(RoleSpec):
    """The reward role."""

    source: RewardSourceSpec
    layout: LayoutSpec = LayoutSpec()
    """How a model-based reward is spread over ranks."""

    def rank_layout(self) -> HybridLayout:
        """The layout as rank arithmetic."""
        return HybridLayout(self.layout.layout())
