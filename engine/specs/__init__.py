"""What a run may ask of the engine: frozen, validated, and free of torch.

One schema serves both ends. A recipe is made of these specs, and a service validates the
section it receives with the same class. Unknown keys are refused. Numbers state their unit.
"""

from rolemesh.engine.specs.base import PartSpec, Spec
from rolemesh.engine.specs.data import (
    DataSpec,
    JsonlSpec,
    ReasoningGymSpec,
)
from rolemesh.engine.specs.estimators import (
    AdaptiveKlSpec,
    EstimatorSpec,
    FixedKlSpec,
    GaeSpec,
    KlControllerSpec,
    KlForm,
    KlPenaltySpec,
)
from rolemesh.engine.specs.losses import (
    AggregatedLossSpec,
    Aggregation,
    LossSpec,
    PpoPolicyLossSpec,
    PpoValueLossSpec,
)
from rolemesh.engine.specs.models import (
    ComputeDtype,
    GenerateSpec,
    LayoutSpec,
    ModelSpec,
    OptimizerSpec,
)
from rolemesh.engine.specs.preferences import (
    BradleyTerryLossSpec,
    DpoLossSpec,
    KtoLossSpec,
    KtoPointSpec,
    SftLossSpec,
)
from rolemesh.engine.specs.rewards import (
    ArithmeticRewardSpec,
    ClassifierRewardSpec,
    ReasoningGymRewardSpec,
    RewardSourceSpec,
)
from rolemesh.engine.specs.roles import (
    ActorSpec,
    CostSpec,
    CriticSpec,
    ReferenceSpec,
    RewardSpec,
    RoleSpec,
)
from rolemesh.engine.specs.rollout import (
    HfSpec,
    RolloutSpec,
    SamplingSpec,
    VllmSpec,
)

__all__ = [
    "ActorSpec",
    "AdaptiveKlSpec",
    "AggregatedLossSpec",
    "Aggregation",
    "ArithmeticRewardSpec",
    "BradleyTerryLossSpec",
    "ClassifierRewardSpec",
    "ComputeDtype",
    "CostSpec",
    "CriticSpec",
    "DataSpec",
    "DpoLossSpec",
    "EstimatorSpec",
    "FixedKlSpec",
    "GaeSpec",
    "GenerateSpec",
    "HfSpec",
    "JsonlSpec",
    "KlControllerSpec",
    "KlForm",
    "KlPenaltySpec",
    "KtoLossSpec",
    "KtoPointSpec",
    "LayoutSpec",
    "LossSpec",
    "ModelSpec",
    "OptimizerSpec",
    "PartSpec",
    "PpoPolicyLossSpec",
    "PpoValueLossSpec",
    "ReasoningGymRewardSpec",
    "ReasoningGymSpec",
    "ReferenceSpec",
    "RewardSourceSpec",
    "RewardSpec",
    "RoleSpec",
    "RolloutSpec",
    "SamplingSpec",
    "SftLossSpec",
    "Spec",
    "VllmSpec",
]
