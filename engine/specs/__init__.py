"""Specs: what a recipe can set in the engine. They are frozen, validated, and free of torch.

One schema serves both ends. A recipe is made of these specs, and a service validates the
section it receives with the same class. Unknown keys are refused. Numbers state their unit.
"""

from rolemesh.engine.specs.base import EstimatorPartSpec as EstimatorPartSpec
from rolemesh.engine.specs.base import PartSpec as PartSpec
from rolemesh.engine.specs.base import Spec as Spec
from rolemesh.engine.specs.data import HELD_OUT_SPLITS as HELD_OUT_SPLITS
from rolemesh.engine.specs.data import CurriculumSpec as CurriculumSpec
from rolemesh.engine.specs.data import DataSpec as DataSpec
from rolemesh.engine.specs.data import HfDatasetSpec as HfDatasetSpec
from rolemesh.engine.specs.data import ImagesSpec as ImagesSpec
from rolemesh.engine.specs.data import JsonlSpec as JsonlSpec
from rolemesh.engine.specs.data import MixtureSpec as MixtureSpec
from rolemesh.engine.specs.data import ParquetSpec as ParquetSpec
from rolemesh.engine.specs.data import PythonCurriculumSpec as PythonCurriculumSpec
from rolemesh.engine.specs.data import ReasoningGymSpec as ReasoningGymSpec
from rolemesh.engine.specs.data import SortedCurriculumSpec as SortedCurriculumSpec
from rolemesh.engine.specs.data import SourceSpec as SourceSpec
from rolemesh.engine.specs.data import StoredRowsSpec as StoredRowsSpec
from rolemesh.engine.specs.data import folder_of_split as folder_of_split
from rolemesh.engine.specs.data import images_of_data as images_of_data
from rolemesh.engine.specs.data import images_of_source as images_of_source
from rolemesh.engine.specs.estimators.by_name import CriticEstimatorSpec as CriticEstimatorSpec
from rolemesh.engine.specs.estimators.by_name import EstimatorSpec as EstimatorSpec
from rolemesh.engine.specs.estimators.by_name import GaeSpec as GaeSpec
from rolemesh.engine.specs.estimators.by_name import OnlineDpoSpec as OnlineDpoSpec
from rolemesh.engine.specs.estimators.by_name import PythonEstimatorSpec as PythonEstimatorSpec
from rolemesh.engine.specs.estimators.by_name import ReinforcePlusPlusSpec as ReinforcePlusPlusSpec
from rolemesh.engine.specs.estimators.by_name import RemaxSpec as RemaxSpec
from rolemesh.engine.specs.estimators.by_name import ReverseKlSpec as ReverseKlSpec
from rolemesh.engine.specs.estimators.by_name import RunningBaselineSpec as RunningBaselineSpec
from rolemesh.engine.specs.estimators.by_name import SafeRlhfSpec as SafeRlhfSpec
from rolemesh.engine.specs.estimators.group_estimators import DrGrpoSpec as DrGrpoSpec
from rolemesh.engine.specs.estimators.group_estimators import GdpoSpec as GdpoSpec
from rolemesh.engine.specs.estimators.group_estimators import (
    GroupAdvantageSpec as GroupAdvantageSpec,
)
from rolemesh.engine.specs.estimators.group_estimators import (
    GroupEstimatorSpec as GroupEstimatorSpec,
)
from rolemesh.engine.specs.estimators.group_estimators import GrpoSpec as GrpoSpec
from rolemesh.engine.specs.estimators.group_estimators import MaxRlSpec as MaxRlSpec
from rolemesh.engine.specs.estimators.group_estimators import PassAtKSpec as PassAtKSpec
from rolemesh.engine.specs.estimators.group_estimators import (
    ReinforcePlusPlusBaselineSpec as ReinforcePlusPlusBaselineSpec,
)
from rolemesh.engine.specs.estimators.group_estimators import RlooSpec as RlooSpec
from rolemesh.engine.specs.estimators.selection import PairedSpec as PairedSpec
from rolemesh.engine.specs.estimators.selection import RewardSpreadSpec as RewardSpreadSpec
from rolemesh.engine.specs.estimators.selection import SelectionSpec as SelectionSpec
from rolemesh.engine.specs.losses.any_loss import LossSpec as LossSpec
from rolemesh.engine.specs.losses.off_policy import CorrectionSpec as CorrectionSpec
from rolemesh.engine.specs.losses.off_policy import GeometricRejectionSpec as GeometricRejectionSpec
from rolemesh.engine.specs.losses.off_policy import MaskingSpec as MaskingSpec
from rolemesh.engine.specs.losses.off_policy import OffPolicySpec as OffPolicySpec
from rolemesh.engine.specs.losses.off_policy import SequenceTruncationSpec as SequenceTruncationSpec
from rolemesh.engine.specs.losses.off_policy import TokenTruncationSpec as TokenTruncationSpec
from rolemesh.engine.specs.losses.policy_losses import (
    ClipCovPolicyLossSpec as ClipCovPolicyLossSpec,
)
from rolemesh.engine.specs.losses.policy_losses import (
    CovariancePolicyLossSpec as CovariancePolicyLossSpec,
)
from rolemesh.engine.specs.losses.policy_losses import DppoPolicyLossSpec as DppoPolicyLossSpec
from rolemesh.engine.specs.losses.policy_losses import GmpoPolicyLossSpec as GmpoPolicyLossSpec
from rolemesh.engine.specs.losses.policy_losses import KlCovPolicyLossSpec as KlCovPolicyLossSpec
from rolemesh.engine.specs.losses.policy_losses import SapoPolicyLossSpec as SapoPolicyLossSpec
from rolemesh.engine.specs.losses.policy_losses import ToprPolicyLossSpec as ToprPolicyLossSpec
from rolemesh.engine.specs.losses.policy_losses import VespoPolicyLossSpec as VespoPolicyLossSpec
from rolemesh.engine.specs.losses.preferences import BradleyTerryLossSpec as BradleyTerryLossSpec
from rolemesh.engine.specs.losses.preferences import DpoLossSpec as DpoLossSpec
from rolemesh.engine.specs.losses.preferences import KtoLossSpec as KtoLossSpec
from rolemesh.engine.specs.losses.preferences import KtoPointSpec as KtoPointSpec
from rolemesh.engine.specs.losses.preferences import SftLossSpec as SftLossSpec
from rolemesh.engine.specs.losses.sampled import AggregatedLossSpec as AggregatedLossSpec
from rolemesh.engine.specs.losses.sampled import Aggregation as Aggregation
from rolemesh.engine.specs.losses.sampled import CispoPolicyLossSpec as CispoPolicyLossSpec
from rolemesh.engine.specs.losses.sampled import DistillationLossSpec as DistillationLossSpec
from rolemesh.engine.specs.losses.sampled import GspoPolicyLossSpec as GspoPolicyLossSpec
from rolemesh.engine.specs.losses.sampled import PolicyTermsSpec as PolicyTermsSpec
from rolemesh.engine.specs.losses.sampled import PpoPolicyLossSpec as PpoPolicyLossSpec
from rolemesh.engine.specs.losses.sampled import PpoValueLossSpec as PpoValueLossSpec
from rolemesh.engine.specs.losses.sampled import PythonPolicyLossSpec as PythonPolicyLossSpec
from rolemesh.engine.specs.losses.sampled import ReinforcePolicyLossSpec as ReinforcePolicyLossSpec
from rolemesh.engine.specs.losses.sampled import TemperedLossSpec as TemperedLossSpec
from rolemesh.engine.specs.losses.token_sums import TokenSumLossSpec as TokenSumLossSpec
from rolemesh.engine.specs.losses.traced_losses import TracedLossSpec as TracedLossSpec
from rolemesh.engine.specs.models.adapters import AdapterSpec as AdapterSpec
from rolemesh.engine.specs.models.rates import DecaySpec as DecaySpec
from rolemesh.engine.specs.models.sections import AdamwMomentsSpec as AdamwMomentsSpec
from rolemesh.engine.specs.models.sections import AdamwStepSpec as AdamwStepSpec
from rolemesh.engine.specs.models.sections import AnyOptimizerSpec as AnyOptimizerSpec
from rolemesh.engine.specs.models.sections import ComputeDtype as ComputeDtype
from rolemesh.engine.specs.models.sections import GenerateSpec as GenerateSpec
from rolemesh.engine.specs.models.sections import GgufType as GgufType
from rolemesh.engine.specs.models.sections import LayoutSpec as LayoutSpec
from rolemesh.engine.specs.models.sections import ModelSpec as ModelSpec
from rolemesh.engine.specs.models.sections import MuonSpec as MuonSpec
from rolemesh.engine.specs.models.sections import Numerics as Numerics
from rolemesh.engine.specs.models.sections import OptimizerSpec as OptimizerSpec
from rolemesh.engine.specs.models.sections import ScheduledSpec as ScheduledSpec
from rolemesh.engine.specs.named import Named as Named
from rolemesh.engine.specs.named import NamedKind as NamedKind
from rolemesh.engine.specs.named import Names as Names
from rolemesh.engine.specs.named import named_in as named_in
from rolemesh.engine.specs.own_functions import OwnFunctionSpec as OwnFunctionSpec
from rolemesh.engine.specs.own_functions import python_form as python_form
from rolemesh.engine.specs.roles import ActorSpec as ActorSpec
from rolemesh.engine.specs.roles import CostSpec as CostSpec
from rolemesh.engine.specs.roles import CriticSpec as CriticSpec
from rolemesh.engine.specs.roles import ModelFolderSpec as ModelFolderSpec
from rolemesh.engine.specs.roles import ReferenceSpec as ReferenceSpec
from rolemesh.engine.specs.roles import RewardSpec as RewardSpec
from rolemesh.engine.specs.roles import RoleSpec as RoleSpec
from rolemesh.engine.specs.roles import RolloutRoleSpec as RolloutRoleSpec
from rolemesh.engine.specs.sampling.agents import AgentSpec as AgentSpec
from rolemesh.engine.specs.sampling.agents import HttpAgentSpec as HttpAgentSpec
from rolemesh.engine.specs.sampling.agents import ProgramAgentSpec as ProgramAgentSpec
from rolemesh.engine.specs.sampling.agents import PythonAgentSpec as PythonAgentSpec
from rolemesh.engine.specs.sampling.endpoint import EndpointSpec as EndpointSpec
from rolemesh.engine.specs.sampling.environments import (
    CalculatorEnvironmentSpec as CalculatorEnvironmentSpec,
)
from rolemesh.engine.specs.sampling.environments import EnvironmentSpec as EnvironmentSpec
from rolemesh.engine.specs.sampling.environments import (
    PythonEnvironmentSpec as PythonEnvironmentSpec,
)
from rolemesh.engine.specs.sampling.environments import (
    ReasoningGymEnvironmentSpec as ReasoningGymEnvironmentSpec,
)
from rolemesh.engine.specs.sampling.environments import TurnEnvironmentSpec as TurnEnvironmentSpec
from rolemesh.engine.specs.sampling.rollout import HfSpec as HfSpec
from rolemesh.engine.specs.sampling.rollout import RolloutSpec as RolloutSpec
from rolemesh.engine.specs.sampling.rollout import SamplingSpec as SamplingSpec
from rolemesh.engine.specs.sampling.rollout import VllmServerSpec as VllmServerSpec
from rolemesh.engine.specs.sampling.rollout import VllmSpec as VllmSpec
from rolemesh.engine.specs.sampling.servers import ServersSpec as ServersSpec
from rolemesh.engine.specs.scores.outside_rewards import DropGroupSpec as DropGroupSpec
from rolemesh.engine.specs.scores.outside_rewards import EndpointRewardSpec as EndpointRewardSpec
from rolemesh.engine.specs.scores.outside_rewards import FailSpec as FailSpec
from rolemesh.engine.specs.scores.outside_rewards import FailurePolicySpec as FailurePolicySpec
from rolemesh.engine.specs.scores.outside_rewards import GiveValueSpec as GiveValueSpec
from rolemesh.engine.specs.scores.outside_rewards import GrpcRewardSpec as GrpcRewardSpec
from rolemesh.engine.specs.scores.outside_rewards import JudgeRewardSpec as JudgeRewardSpec
from rolemesh.engine.specs.scores.outside_rewards import KServeRewardSpec as KServeRewardSpec
from rolemesh.engine.specs.scores.outside_rewards import NemoGymRewardSpec as NemoGymRewardSpec
from rolemesh.engine.specs.scores.outside_rewards import OpenRlhfRewardSpec as OpenRlhfRewardSpec
from rolemesh.engine.specs.scores.outside_rewards import OutsideRewardSpec as OutsideRewardSpec
from rolemesh.engine.specs.scores.outside_rewards import PythonRewardSpec as PythonRewardSpec
from rolemesh.engine.specs.scores.outside_rewards import SlimeRewardSpec as SlimeRewardSpec
from rolemesh.engine.specs.scores.outside_rewards import outside_source as outside_source
from rolemesh.engine.specs.scores.rewards import ArithmeticRewardSpec as ArithmeticRewardSpec
from rolemesh.engine.specs.scores.rewards import ClassifierRewardSpec as ClassifierRewardSpec
from rolemesh.engine.specs.scores.rewards import EnvironmentRewardSpec as EnvironmentRewardSpec
from rolemesh.engine.specs.scores.rewards import OwnRewardSpec as OwnRewardSpec
from rolemesh.engine.specs.scores.rewards import ReasoningGymRewardSpec as ReasoningGymRewardSpec
from rolemesh.engine.specs.scores.rewards import RewardSourceSpec as RewardSourceSpec
from rolemesh.engine.specs.scores.rewards import SingleRewardSpec as SingleRewardSpec
from rolemesh.engine.specs.scores.rewards import WeightedRewardSpec as WeightedRewardSpec
from rolemesh.engine.specs.scores.rewards import WeightedSumSpec as WeightedSumSpec
from rolemesh.engine.specs.scores.rewards import may_drop_groups as may_drop_groups
from rolemesh.engine.specs.scores.rewards import named_sources as named_sources
from rolemesh.engine.specs.scores.teacher_prompts import SelfTeacherSpec as SelfTeacherSpec
from rolemesh.engine.specs.scores.teacher_prompts import TeacherPromptSpec as TeacherPromptSpec
from rolemesh.engine.specs.scores.teacher_routes import LEFT as LEFT
from rolemesh.engine.specs.scores.teacher_routes import RouteShare as RouteShare
from rolemesh.engine.specs.scores.teacher_routes import TeacherRouteSpec as TeacherRouteSpec
from rolemesh.engine.specs.scores.teacher_routes import routed_value as routed_value
from rolemesh.engine.specs.shaped_rewards import AdaptiveKlSpec as AdaptiveKlSpec
from rolemesh.engine.specs.shaped_rewards import FixedKlSpec as FixedKlSpec
from rolemesh.engine.specs.shaped_rewards import KlControllerSpec as KlControllerSpec
from rolemesh.engine.specs.shaped_rewards import KlForm as KlForm
from rolemesh.engine.specs.shaped_rewards import KlPenaltySpec as KlPenaltySpec
from rolemesh.engine.specs.shaped_rewards import OverlongSpec as OverlongSpec
from rolemesh.engine.specs.shaped_rewards import ShapedRewardSpec as ShapedRewardSpec
from rolemesh.engine.specs.teachers import OneTeacherSpec as OneTeacherSpec
from rolemesh.engine.specs.teachers import TeacherServerSpec as TeacherServerSpec
from rolemesh.engine.specs.teachers import TeacherSpec as TeacherSpec
