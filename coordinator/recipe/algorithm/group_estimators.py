"""What estimators of groups need of the rest of the recipe."""

from __future__ import annotations

from rolemesh.coordinator.recipe.algorithm.algorithms import (
    AlgorithmSection,
    AlgorithmSpec,
    SampledSpec,
)
from rolemesh.engine.specs import GdpoSpec, PassAtKSpec, RewardSpec, named_sources


def with_group_estimator(algorithm: AlgorithmSpec, reward: RewardSpec | None) -> AlgorithmSpec:
    """An algorithm's section whose estimator fits its samples and knows its rewards.

    Args:
        algorithm: Of the recipe.
        reward: The section of the reward; None: the recipe has none.

    Returns:
        The section as it is, but with the estimator gdpo the weights of reward.source, where it
        leaves them out.

    Raises:
        ValueError: Groups are too small for pass@k; or with gdpo the reward has one source alone,
            or not the one that a weight names.
    """
    if not isinstance(algorithm, AlgorithmSection):
        return algorithm
    estimator = algorithm.parts.fields.get("advantages")
    if isinstance(estimator, PassAtKSpec) and isinstance(algorithm, SampledSpec):
        samples = algorithm.sampling.samples_per_prompt
        if samples <= estimator.k:
            raise ValueError(
                f"algorithm.advantages.k is {estimator.k}, but algorithm.sampling."
                f"samples_per_prompt is {samples}: pass@k compares with sets of k other "
                "completions; raise the second above the first"
            )
    if not isinstance(estimator, GdpoSpec) or reward is None:
        return algorithm
    weights = {str(one.name): one.weight for one in named_sources(reward.source)}
    if len(weights) < 2:
        raise ValueError(
            f"algorithm.advantages.type is 'gdpo', but reward.source is {min(weights)!r} alone: "
            "give a list of sources, or take 'grpo'"
        )
    unknown = [name for name in estimator.weights if name not in weights]
    if unknown:
        raise ValueError(
            f"algorithm.advantages.weights has {unknown[0]!r}, but the sources of the reward are "
            f"{', '.join(weights)}: name one of these"
        )
    if estimator.weights:
        return algorithm
    estimator = estimator.model_copy(update={"weights": weights})
    return algorithm.model_copy(update={"advantages": estimator})
