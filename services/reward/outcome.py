"""Makes the sources of a reward from a spec, and columns and metrics from what they gave."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from rolemesh.engine.algorithms.judged import left_out
from rolemesh.engine.experience import Column, ColumnKind, Experience
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.rewards.pass_at import pass_at
from rolemesh.engine.rewards.sources import make_reward, reward_metrics
from rolemesh.engine.sandbox.host import Sandbox
from rolemesh.engine.specs import (
    OutsideRewardSpec,
    SingleRewardSpec,
    WeightedRewardSpec,
    WeightedSumSpec,
    named_sources,
)
from rolemesh.engine.specs.columns import IS_JUDGED, SOURCE_PREFIX, source_column
from rolemesh.services.reward.judging import Judged, OutsideSource, OwnSource, RewardSources, Source
from rolemesh.services.reward.outside.counts import RequestObserver
from rolemesh.services.reward.outside.make import make_outside_reward
from rolemesh.services.reward.outside.parts import means
from rolemesh.services.reward.outside_rows import RowReader

_PARTS = "parts"
"""End of the name of the column with the parts of rewards: a JSON object a row."""


def make_sources(
    source: SingleRewardSpec | WeightedSumSpec,
    device: torch.device,
    mesh: RankMesh,
    sandbox: Sandbox,
    observer: RequestObserver | None,
) -> RewardSources:
    """Builds every source of a reward.

    Args:
        source: Spec of the reward.
        device: Device of our own models.
        mesh: Ranks over which such a model is spread.
        sandbox: Where a function runs.
        observer: Observer of each request to an outside source.
    """

    def built(reward: WeightedRewardSpec) -> Source:
        spec, name = reward.source, str(reward.name)
        if isinstance(spec, OutsideRewardSpec):
            return OutsideSource(
                name=name,
                weight=reward.weight,
                reward=make_outside_reward(name, spec, sandbox, observer),
                reader=RowReader(getattr(spec, "tokenizer", None)),
                on_failure=spec.on_failure,
            )
        return OwnSource(name=name, weight=reward.weight, reward=make_reward(spec, device, mesh))

    return RewardSources([built(reward) for reward in named_sources(source)])


def judged_columns(
    column: str, batch: Experience, judged: Judged, sources: RewardSources
) -> Experience:
    """Makes the columns that are published of a judgement.

    Args:
        column: Name of the rewards.
        batch: The judged rows. They have prompt_ids and loss_mask if groups may be dropped, and
            is_judged if another role has dropped some.
        judged: The judgement.
        sources: The sources that gave it.
    """
    columns = {column: Column(ColumnKind.ROW, judged.rewards_B)}
    if sources.tells_sources:
        columns |= {
            source_column(name): Column(ColumnKind.ROW, values_B)
            for name, values_B in judged.by_source.items()
        }
    if sources.asks_outside:
        columns[f"{column}/{_PARTS}"] = Column.text([json.dumps(row) for row in judged.parts])
    found = Experience(columns)
    return found | left_out(batch, judged.is_judged_B) if sources.may_drop else found


def judgement_metrics(
    columns: Experience,
    column: str,
    name: str,
    full_score: float | None,
    prompt_ids_B: torch.Tensor | None,
    ks: Sequence[int],
) -> dict[str, float]:
    """Computes scalars over the judged rows.

    Args:
        columns: Columns of `judged_columns`, for all rows; the mask is not needed.
        column: Name of the rewards.
        name: Prefix of the metrics, e.g. "cost".
        full_score: Reward of a fully right row; None: there is no such reward.
        prompt_ids_B: int64 [B], for pass@k; None: no pass@k.
        ks: The k of pass@k.

    Returns:
        Metrics of `reward_metrics`, or nothing if no row is judged. For each source also its mean
        and deviation over the rows to which it applies, the number of other rows, and the mean of
        each part of its rewards over the rows that have it. If rows may be dropped, also
        "<name>/dropped_rows".
    """
    rewards_B = columns[column].values
    metrics: dict[str, float] = {}
    if IS_JUDGED in columns:
        metrics[f"{name}/dropped_rows"] = float((~columns[IS_JUDGED].values).sum())
    judged_B = ~rewards_B.isnan()
    if bool(judged_B.any()):
        metrics |= reward_metrics(rewards_B[judged_B], full_score, name)
    if prompt_ids_B is not None and full_score is not None:
        metrics |= pass_at(rewards_B >= full_score, prompt_ids_B, ks)
    for label, values in columns.columns.items():
        if not label.startswith(SOURCE_PREFIX):
            continue
        label = f"{name}/{label.removeprefix(SOURCE_PREFIX)}"
        given = values.values[~values.values.isnan()].double()
        metrics[f"{label}/absent_rows"] = float(len(values.values) - len(given))
        if len(given):
            metrics[f"{label}/mean"] = float(given.mean())
            metrics[f"{label}/std"] = float(given.std(correction=0))
    if f"{column}/{_PARTS}" in columns:
        rows = [json.loads(text) for text in columns[f"{column}/{_PARTS}"].strings()]
        metrics |= {f"{name}/{part}": mean for part, mean in means(rows).items()}
    return metrics
