"""Closed formulas of RL post-training, each with its source.

Importing any part of it registers every estimator and every loss with its spec: see
`estimators.estimation.estimator_for` and `losses.base.loss_for`.
"""

from rolemesh.engine.algorithms.estimators import critic_advantages as critic_advantages
from rolemesh.engine.algorithms.estimators import decoupled_advantages as decoupled_advantages
from rolemesh.engine.algorithms.estimators import group_advantages as group_advantages
from rolemesh.engine.algorithms.estimators import own_estimators as own_estimators
from rolemesh.engine.algorithms.estimators import reinforce as reinforce
from rolemesh.engine.algorithms.estimators import running_baseline as running_baseline
from rolemesh.engine.algorithms.estimators import teacher_advantages as teacher_advantages
from rolemesh.engine.algorithms.losses import covariance_losses as covariance_losses
from rolemesh.engine.algorithms.losses import distillation as distillation
from rolemesh.engine.algorithms.losses import own_losses as own_losses
from rolemesh.engine.algorithms.losses import policy_losses as policy_losses
from rolemesh.engine.algorithms.losses import soft_policy_losses as soft_policy_losses
from rolemesh.engine.algorithms.losses import token_sums as token_sums
from rolemesh.engine.algorithms.losses import traced_losses as traced_losses
from rolemesh.engine.algorithms.losses import value_losses as value_losses
from rolemesh.engine.algorithms.preferences import kto as kto
from rolemesh.engine.algorithms.preferences import online_pairs as online_pairs
from rolemesh.engine.algorithms.preferences import preference_losses as preference_losses
