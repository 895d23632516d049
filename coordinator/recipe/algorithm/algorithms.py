"""The algorithm section of a recipe: one spec for each algorithm, with its numeric parts.

What a part means and reads stands with its own spec in `rolemesh.engine.specs`. A spec's `type` is
the name of a function in `coordinator/algorithms`, or of a row of `POLICY_GRADIENTS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, Union

from pydantic import Field, create_model, model_validator

from rolemesh.coordinator.recipe.algorithm.parts import (
    AlgorithmParts,
    AnyDistillingLossSpec,
    AnyGroupEstimatorSpec,
    AnyPolicyLossSpec,
    GaeOrOwnSpec,
    PpoOrOwnLossSpec,
    ReinforceOrPpoLossSpec,
    estimator_choice,
    long_forms,
    policy_loss_choice,
)
from rolemesh.coordinator.recipe.algorithm.policy_gradients import POLICY_GRADIENTS, PolicyGradient
from rolemesh.engine.specs import (
    BradleyTerryLossSpec,
    DpoLossSpec,
    EstimatorSpec,
    GaeSpec,
    GrpoSpec,
    KtoLossSpec,
    KtoPointSpec,
    LossSpec,
    Names,
    OffPolicySpec,
    OnlineDpoSpec,
    OwnFunctionSpec,
    PolicyTermsSpec,
    PpoPolicyLossSpec,
    PpoValueLossSpec,
    ReinforcePolicyLossSpec,
    RemaxSpec,
    ReverseKlSpec,
    RewardSpreadSpec,
    SafeRlhfSpec,
    SamplingSpec,
    SelectionSpec,
    SftLossSpec,
    ShapedRewardSpec,
    Spec,
    TemperedLossSpec,
)


class AlgorithmSection(Spec):
    """The base of every algorithm that is a function: how a step's rows become optimizer steps."""

    least_prompts: ClassVar[int] = 1
    """Fewest rows of the data that a step can be made of."""

    epochs: int = Field(default=1, ge=1)
    """Passes over a step's experience."""
    mini_batch_rows: int = Field(default=64, ge=1)
    """Trajectories of one optimizer step. A multiple of the completions a prompt keeps these
    together, so that an update computes their prompt once."""

    @property
    def rows_per_unit(self) -> int:
        """Neighbouring rows that an update keeps together."""
        return 1

    @property
    def rows_per_prompt(self) -> int | None:
        """Rows that a step trains on for each of its prompts, where none is left out.

        None: the section does not say.
        """
        return 1

    @property
    def parts(self) -> AlgorithmParts:
        """The numeric parts that the section gives."""
        return AlgorithmParts(dict(self))

    @property
    def own_functions(self) -> dict[str, OwnFunctionSpec]:
        """Functions of the user among the parts, by the field of the recipe that names each."""
        return {
            f"algorithm.{name}": OwnFunctionSpec(function=part.function, config=part.config)
            for name, part in self
            if isinstance(part, OwnFunctionSpec)
        }

    @model_validator(mode="before")
    @classmethod
    def _written_short(cls, data: Any) -> Any:
        return long_forms(cls, data)


class SampledSpec(AlgorithmSection):
    """The base of algorithms on trajectories that the policy samples."""

    chooses_prompts: ClassVar[bool] = False
    """Whether the function itself may ask for further prompts: then no sampler can begin them
    before the step."""

    sampling: SamplingSpec = SamplingSpec()
    off_policy: OffPolicySpec | None = None
    """How the policy loss is corrected for samples of older weights, or of a sampler that rounds
    otherwise; null: not at all. Left out it is null, but with run.numerics "fast" token_truncation
    for losses that do not correct themselves."""

    @property
    def rows_per_unit(self) -> int:
        """The completions of a prompt, where mini-batches hold whole groups."""
        group = self.sampling.samples_per_prompt
        return group if self.mini_batch_rows % group == 0 else 1

    @property
    def rows_per_prompt(self) -> int | None:
        """The completions of a prompt."""
        return self.sampling.samples_per_prompt

    @model_validator(mode="after")
    def _check_off_policy(self) -> Self:
        loss = self.parts.fields.get("policy_loss")
        if not isinstance(loss, PolicyTermsSpec):
            if self.off_policy is not None:
                named = "not given" if loss is None else repr(getattr(loss, "type", None))
                raise ValueError(
                    f"off_policy is {self.off_policy.type!r}, but policy_loss is {named}, which "
                    "compares with no log-probs of sampling: take off_policy out"
                )
            return self
        if self.off_policy is not None and loss.compares_with_sampler:
            name = type(loss).model_fields["type"].default
            raise ValueError(
                f"off_policy is {self.off_policy.type!r}, but policy_loss is {name!r}, which "
                "weighs rows by their ratio to the weights that sampled itself: take off_policy out"
            )
        if loss.off_policy not in (None, self.off_policy):
            raise ValueError(
                f"policy_loss.off_policy is {loss.off_policy.type!r}, but a recipe says it for all "
                "losses in algorithm.off_policy: move it there"
            )
        if loss.off_policy != self.off_policy:
            # It travels within the loss. The section is frozen for its users, who get it after.
            loss = loss.model_copy(update={"off_policy": self.off_policy})
            object.__setattr__(self, "policy_loss", loss)
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        loss = self.parts.fields.get("policy_loss")
        if isinstance(loss, TemperedLossSpec) and "temperature" not in loss.model_fields_set:
            loss = loss.model_copy(update={"temperature": self.sampling.temperature})
            # The section is frozen for its users, who get it after this.
            object.__setattr__(self, "policy_loss", loss)
        if isinstance(loss, TemperedLossSpec) and loss.temperature != self.sampling.temperature:
            raise ValueError(
                f"policy_loss.temperature is {loss.temperature} but "
                f"sampling.temperature is {self.sampling.temperature}: leave the first one out, or "
                "the ratio compares two different distributions"
            )
        if self.sampling.top_p != 1.0 or self.sampling.top_k != -1:
            raise ValueError(
                f"sampling.top_p is {self.sampling.top_p} and sampling.top_k is "
                f"{self.sampling.top_k}: training needs 1.0 and -1; the sampler's log-probs would "
                "be those of a cut distribution, and the trainer's those of the whole one"
            )
        return self


class _GroupSpec(SampledSpec):
    """The base of algorithms that compare the completions of one prompt with each other."""

    sampling: SamplingSpec = SamplingSpec(samples_per_prompt=8)

    @model_validator(mode="after")
    def _check_group(self) -> Self:
        if self.sampling.samples_per_prompt < 2:
            raise ValueError(
                "sampling.samples_per_prompt is 1, but the algorithm compares the completions of a "
                "prompt with each other: give at least 2"
            )
        return self


class _PairedSpec(AlgorithmSection):
    """The base of algorithms on rows that come in twos."""

    @property
    def rows_per_unit(self) -> int:
        """The two rows of a pair."""
        return 2

    @property
    def rows_per_prompt(self) -> int | None:
        """The two rows of a pair."""
        return 2

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.mini_batch_rows % 2:
            raise ValueError(
                f"mini_batch_rows is {self.mini_batch_rows}, but rows come in twos: give an even "
                "number"
            )
        return self


class PpoSpec(SampledSpec):
    """Proximal policy optimisation with a critic (arXiv 1707.06347)."""

    type: Literal["ppo"] = "ppo"
    advantages: GaeOrOwnSpec = GaeSpec()
    """The estimator of advantages."""
    policy_loss: PpoOrOwnLossSpec = PpoPolicyLossSpec()
    """The loss of the policy."""
    value_loss: PpoValueLossSpec = PpoValueLossSpec()


class SafeRlhfAlgorithmSpec(SampledSpec):
    """Safe RLHF: PPO under a limit on the mean cost (arXiv 2310.12773)."""

    type: Literal["safe_rlhf"] = "safe_rlhf"
    advantages: SafeRlhfSpec = SafeRlhfSpec()
    policy_loss: PpoOrOwnLossSpec = PpoPolicyLossSpec()
    """The loss of the policy."""
    value_loss: PpoValueLossSpec = PpoValueLossSpec()
    pretraining_weight: float = Field(default=0.0, ge=0)
    """Weight of the loss on pretraining texts (PTX); 0 reads none."""


class PolicyGradientSpec(SampledSpec):
    """The base of the family of GRPO: `POLICY_GRADIENTS` has a row for each of its sections."""

    type: str
    advantages: ShapedRewardSpec
    """The estimator of advantages."""
    policy_loss: PolicyTermsSpec
    """The loss of the policy."""


class _GroupGradientSpec(_GroupSpec, PolicyGradientSpec):
    """The base of those that compare the completions of one prompt with each other."""


def section_of(name: str, row: PolicyGradient) -> type[PolicyGradientSpec]:
    """The section of an algorithm of the family.

    Args:
        name: Its `type` in a recipe.
        row: What it does where a recipe says nothing else.
    """
    literal: Any = Literal
    loss = row.policy_loss
    kind, default = (loss, ...) if isinstance(loss, type) else (type(loss), loss)
    return create_model(
        f"{name.title().replace('_', '')}AlgorithmSpec",
        __base__=_GroupGradientSpec if row.compares else PolicyGradientSpec,
        __module__=__name__,
        __doc__=row.paper,
        # There is no source to find: pydantic would look at all loaded modules for each frame.
        __cls_kwargs__={"use_attribute_docstrings": False},
        sampling=(SamplingSpec, SamplingSpec(samples_per_prompt=row.samples_per_prompt)),
        type=(literal[name], name),
        advantages=(
            estimator_choice(type(row.advantages)),
            Field(row.advantages, description="The estimator of advantages."),
        ),
        policy_loss=(
            policy_loss_choice(kind),
            Field(default, description=row.loss_text),
        ),
    )


if TYPE_CHECKING:
    AnyPolicyGradientSpec = PolicyGradientSpec
else:
    AnyPolicyGradientSpec = Union[  # noqa: UP007
        tuple(section_of(name, row) for name, row in POLICY_GRADIENTS.items())
    ]


class DapoSpec(_GroupSpec):
    """DAPO: GRPO with dynamic sampling, a higher upper clip and a token mean (arXiv 2503.14476)."""

    chooses_prompts: ClassVar[bool] = True

    type: Literal["dapo"] = "dapo"
    advantages: AnyGroupEstimatorSpec = GrpoSpec()
    """The estimator of advantages."""
    policy_loss: AnyPolicyLossSpec = PpoPolicyLossSpec(clip_low=0.2, clip_high=0.28)
    """The loss of the policy."""
    selection: SelectionSpec = RewardSpreadSpec()
    """Which groups of completions a step keeps."""
    max_rounds: int = Field(default=10, ge=1)
    """Times that a step samples until it has enough groups."""


class RemaxAlgorithmSpec(SampledSpec):
    """ReMax: REINFORCE with the greedy completion as baseline, and no critic (arXiv 2310.10505)."""

    type: Literal["remax"] = "remax"
    advantages: RemaxSpec = RemaxSpec()
    policy_loss: ReinforceOrPpoLossSpec = ReinforcePolicyLossSpec()
    """The loss of the policy."""


class OnPolicyDistillationSpec(SampledSpec):
    """On-policy distillation: a teacher scores the policy's own tokens (arXiv 2306.13649).

    With a policy loss over sampled tokens the teacher is the reward ("On-Policy Distillation",
    Thinking Machines Lab, 2025); with the loss "distillation" whole distributions are compared.
    """

    type: Literal["on_policy_distillation"] = "on_policy_distillation"
    advantages: ReverseKlSpec = ReverseKlSpec()
    """The teacher's say of each token that was sampled."""
    policy_loss: AnyDistillingLossSpec = PpoPolicyLossSpec()
    """The loss of the policy."""


class OnlineDpoAlgorithmSpec(_GroupSpec):
    """DPO on pairs of the policy's own completions (arXiv 2402.04792)."""

    type: Literal["online_dpo"] = "online_dpo"
    sampling: SamplingSpec = SamplingSpec(samples_per_prompt=2)
    advantages: OnlineDpoSpec = OnlineDpoSpec()
    policy_loss: DpoLossSpec = DpoLossSpec()

    @model_validator(mode="after")
    def _check_whole_groups(self) -> Self:
        group = self.sampling.samples_per_prompt
        if self.mini_batch_rows % group:
            raise ValueError(
                f"mini_batch_rows is {self.mini_batch_rows} and sampling.samples_per_prompt is "
                f"{group}: give a multiple, so that the two rows of a pair stay together"
            )
        return self


class DpoSpec(_PairedSpec):
    """Direct preference optimisation on given pairs: DPO, cDPO and IPO (arXiv 2305.18290)."""

    type: Literal["dpo"] = "dpo"
    policy_loss: DpoLossSpec = DpoLossSpec()


class KtoSpec(_PairedSpec):
    """Kahneman-Tversky optimisation on judged completions (arXiv 2402.01306)."""

    least_prompts: ClassVar[int] = 2
    """Each is compared with the completion of another one."""

    type: Literal["kto"] = "kto"
    advantages: KtoPointSpec = KtoPointSpec()
    policy_loss: KtoLossSpec = KtoLossSpec()


class SftSpec(AlgorithmSection):
    """Supervised fine-tuning on given completions."""

    type: Literal["sft"] = "sft"
    policy_loss: SftLossSpec = SftLossSpec()


class RewardModelSpec(_PairedSpec):
    """Training of a reward model on pairs (Bradley-Terry, arXiv 2203.02155, eq. 1)."""

    type: Literal["reward_model"] = "reward_model"
    reward_loss: BradleyTerryLossSpec = BradleyTerryLossSpec()


EXTERNAL: Final = "external"
"""Type of the algorithm that is no function here."""


class ExternalSpec(Spec):
    """Steps that a client of the services makes: the run starts them and holds them for it.

    run.steps, run.prompts_per_step and run.samples are not read: the client decides on them.
    """

    type: Literal["external"] = EXTERNAL


class CustomSpec(SampledSpec):
    """A function of yours, with whatever parts it asks for."""

    chooses_prompts: ClassVar[bool] = True

    type: Literal["custom"] = "custom"
    function: Annotated[str, Names("code")] = Field(pattern=r"^(.+\.py:)?[A-Za-z_][\w.-]*$")
    """"path/to/file.py:name", or the name of an entry point of the group rolemesh.algorithms."""
    advantages: EstimatorSpec | None = None
    """The estimator, where the function asks for one."""
    policy_loss: LossSpec | None = None
    """The loss of the policy, where the function updates the actor."""
    value_loss: LossSpec | None = None
    """The loss of the critic, where the function updates it."""
    reward_loss: LossSpec | None = None
    """The loss of the reward model, where the function updates it."""
    selection: SelectionSpec | None = None
    """Which groups of completions a step keeps, where the function selects some."""
    max_rounds: int = Field(default=10, ge=1)
    """Times that a step samples until it has enough groups."""
    pretraining_weight: float = Field(default=0.0, ge=0)
    """Weight of the loss on pretraining texts."""
    unit_rows: int | None = Field(default=None, ge=1)
    """Neighbouring rows that an update keeps together: 2 for pairs that are read from data. None:
    the completions of a prompt."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Numbers of your own."""

    @property
    def rows_per_unit(self) -> int:
        """What `unit_rows` says."""
        return super().rows_per_unit if self.unit_rows is None else self.unit_rows

    @property
    def rows_per_prompt(self) -> int | None:
        """None: the function may train on what it likes, as often as it likes."""
        return None

    @model_validator(mode="after")
    def _check_units(self) -> Self:
        if self.unit_rows is not None and self.mini_batch_rows % self.unit_rows:
            raise ValueError(
                f"mini_batch_rows is {self.mini_batch_rows} and unit_rows is {self.unit_rows}: "
                "give a multiple"
            )
        return self


AlgorithmSpec = Annotated[
    PpoSpec
    | SafeRlhfAlgorithmSpec
    | AnyPolicyGradientSpec
    | DapoSpec
    | RemaxAlgorithmSpec
    | OnPolicyDistillationSpec
    | OnlineDpoAlgorithmSpec
    | DpoSpec
    | KtoSpec
    | SftSpec
    | RewardModelSpec
    | CustomSpec
    | ExternalSpec,
    Field(discriminator="type"),
]
