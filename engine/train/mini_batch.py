"""Loss and gradients of one mini-batch that may be spread over ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from rolemesh.engine.algorithms.aggregation import LossScale
from rolemesh.engine.algorithms.losses.base import Loss, MetricShares, ModelOutputs, add_metrics
from rolemesh.engine.algorithms.preferences.pairs import Pairs
from rolemesh.engine.experience import ColumnKind, Experience
from rolemesh.engine.granted.user_code import UserCodeError
from rolemesh.engine.hardware.devices import sent
from rolemesh.engine.models import scoring
from rolemesh.engine.models.causal_lm import TokenScores
from rolemesh.engine.models.rank_model import (
    MicroBatch,
    RankModel,
    check_in_vocabulary,
    filler_rows,
    with_fillers,
)
from rolemesh.engine.models.scoring import Progress, columns_read
from rolemesh.engine.parallel.agreement import gather_facts, prepare_together
from rolemesh.engine.parallel.mesh import RankMesh
from rolemesh.engine.specs.columns import INPUT_COLUMNS
from rolemesh.engine.train.optimizers.optimizer import LossNotFiniteError


def accumulate(
    rank_model: RankModel,
    batch: Experience,
    places: Sequence[int],
    loss: Loss[Any],
    *,
    temperature: float,
    progress: Progress | None,
    rows_per_unit: int = 1,
    weight: float = 1.0,
    trains: bool = True,
    reports_entropy: bool = True,
) -> tuple[dict[str, float], Experience]:
    """Adds the gradients of a loss over a mini-batch to those of the parameters.

    All ranks call it: those of a data-parallel replica with the same rows, replicas with parts of
    the mini-batch that share no row (some may be empty).

    The device is read once, when all micro-batches are done: the next one is on its way while it
    computes this one.

    Args:
        rank_model: The model.
        batch: With the columns that the loss names.
        places: Rows of `batch` that are this replica's part.
        loss: What to minimise.
        temperature: Of a policy's softmax.
        progress: Called after each micro-batch.
        rows_per_unit: Neighbouring places that share a micro-batch; 1: each row for itself.
        weight: Of the gradients; metrics are not weighted.
        trains: Whether there are gradients; without, the loss alone is computed.
        reports_entropy: Whether a policy's entropy is computed for the metrics where the loss does
            not need it. It takes two passes over the logits.

    Returns:
        Metrics over the whole mini-batch, equal on all ranks, computed_fraction (tokens computed
        for each token of the rows) among them; and on the last stage the column
        logprobs, values or scores of the forward pass for this replica's part, in the order of
        `places`, with the column choices of what the loss tells besides.

    Raises:
        LossNotFiniteError: The loss of the whole mini-batch is NaN or infinite; on all ranks.
        ColumnMissingError: The batch lacks a column.
        ValueError: The rows of this rank, or of another one, cannot be used, or the loss refuses
            a column.
        UserCodeError: A function of the user failed, or gave what is no loss; on all ranks.
        PairIncompleteError: A pair's rows do not share a micro-batch.
    """
    mesh, device = rank_model.mesh, rank_model.device

    def prepare() -> tuple[tuple[Experience, list[MicroBatch]], tuple[int, tuple[float, ...]]]:
        extra = loss.optional_columns
        extra = extra if all(name in batch for name in extra) else ()
        inputs = columns_read(INPUT_COLUMNS, batch, rank_model.model)
        columns = dict.fromkeys((*inputs, *loss.columns, "loss_mask", *extra))
        part = batch.require(columns).select(torch.tensor(places, dtype=torch.int64))
        for name in loss.choices:
            check_in_vocabulary(part[name].values, rank_model.model.config, name)
        passes = rank_model.micro_batches(part, rows_per_unit)
        counts = loss.scale_of(part)
        _try(loss, filler_rows(part), counts)
        if "pair_ids" in loss.columns:
            for micro_batch in passes:
                Pairs.of(micro_batch.part)
        return (part, passes), (len(passes), dataclasses.astuple(counts))

    (part, passes), facts = prepare_together(prepare, mesh.parts, device)
    passes = with_fillers(passes, part, max(number for number, _ in facts), rank_model.model)
    counts = LossScale.total(LossScale(*counts) for _, counts in facts)
    scale = loss.completed(counts, part, partial(gather_facts, group=mesh.parts, device=device))
    shares = MetricShares()
    failures: list[str] = []
    kind = ColumnKind.ROW if loss.needs == "scores" else ColumnKind.COMPLETION
    widths: dict[str, int] = {loss.needs: 1}
    if loss.choices and loss.tells_choices:
        widths["choices"] = sum(part[name].width for name in loss.choices)
    collector = scoring.Collector(widths, kind)

    def close(number: int, outputs: Any) -> torch.Tensor:
        trained, found = _found(loss, outputs)
        try:
            share, metrics = loss(found, passes[number].part, scale)
        except UserCodeError as error:
            # Told after the pass: a rank that stopped within would leave the others waiting.
            failures.append(str(error))
            share, metrics = 0.0 * trained.sum(), {"loss": trained.new_full((), math.nan)}
        shares.add(metrics)
        told: dict[str, torch.Tensor] = {loss.needs: trained}
        if loss.tells_choices and found.choices_NK is not None:
            told["choices"] = found.choices_NK
        collector.add(passes[number], told)
        return share if weight == 1.0 else weight * share

    def arguments(one: MicroBatch) -> dict[str, Any]:
        if loss.needs != "logprobs":
            return {}
        with_entropy = loss.needs_entropy or (loss.reports_entropy and reports_entropy)
        given: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy}
        if loss.choices:
            columns = [one.part[name] for name in loss.choices]
            ids_NK = torch.cat([ids.values.view(len(ids.values), ids.width) for ids in columns], 1)
            given["choices_NK"] = sent(ids_NK.long(), device)
        return given

    rank_model.run(
        passes,
        close,
        trains=trains,
        arguments=arguments,
        done=scoring.RowProgress(
            progress, "forward_backward" if trains else "compute_loss", passes, len(places)
        ),
    )
    totals = shares.totals()
    totals |= {
        "tokens_computed": float(sum(one.num_tokens for one in passes)),
        "tokens_of_rows": float(len(part["tokens"].values)),
    }
    metrics = _metrics_of_all(totals, mesh, device, is_broken=bool(failures))
    _check_finite(metrics, loss, failures, mesh, device, trains=trains)
    return loss.finished(metrics), collector.in_batch_order()


def _try(loss: Loss[Any], no_tokens: Experience, scale: LossScale) -> None:
    """Has a loss look at the columns and at its own spec, on rows without completion tokens.

    What it refuses would otherwise be found in the middle of a pass, on the last stage alone.
    """
    nothing_N = torch.zeros(0)
    outputs: Any = TokenScores(nothing_N, nothing_N)
    if loss.choices:
        width = sum(no_tokens[name].width for name in loss.choices)
        outputs = outputs._replace(choices_NK=torch.zeros(0, width))
    if loss.needs != "logprobs":
        outputs = nothing_N if loss.needs == "values" else torch.zeros(no_tokens.num_rows)
    loss(_found(loss, outputs)[1], no_tokens, scale)


def _found(loss: Loss[Any], outputs: Any) -> tuple[torch.Tensor, ModelOutputs]:
    """What a model gave that a loss needs: the trained output, and all of them by name."""
    if loss.needs == "values":
        return outputs, ModelOutputs(values_N=outputs)
    if loss.needs == "scores":
        return outputs, ModelOutputs(scores_B=outputs)
    found = ModelOutputs(
        logprobs_N=outputs.logprobs_N,
        entropy_N=outputs.entropy_N,
        choices_NK=outputs.choices_NK,
    )
    return outputs.logprobs_N, found


def _metrics_of_all(
    shares: dict[str, float], mesh: RankMesh, device: torch.device, *, is_broken: bool
) -> dict[str, float]:
    """Metrics of the whole mini-batch, equal on all ranks.

    A replica's share is known to all ranks of its last stage, slices and those that cut rows; the
    first of them tells, and each whose loss failed (`is_broken`), so that it is NaN for all.
    """
    is_first = mesh.pp.is_last and mesh.tp.is_first and mesh.cp.is_first
    told = shares if is_broken or is_first else {}
    metrics: dict[str, float] = {}
    for share in gather_facts(told, mesh.world, device):
        add_metrics(metrics, share)
    # Of a mini-batch without rows fillers alone are computed.
    of_rows = max(1.0, metrics.pop("tokens_of_rows"))
    metrics["computed_fraction"] = metrics.pop("tokens_computed") / of_rows
    return metrics


def _check_finite(
    metrics: Mapping[str, float],
    loss: Loss[Any],
    failures: Sequence[str],
    mesh: RankMesh,
    device: torch.device,
    *,
    trains: bool,
) -> None:
    # After the pass: a rank that stopped within would leave the others waiting for it.
    if math.isfinite(metrics["loss"]):
        return
    for rank, told in enumerate(gather_facts(list(failures[:1]), mesh.world, device)):
        if told:
            where = f"rank {rank}: " if mesh.world.size > 1 else ""
            raise UserCodeError(f"{where}{told[0]}")
    dropped = "gradients were dropped, weights not touched; " if trains else ""
    raise LossNotFiniteError(
        f"loss is {metrics['loss']} (metrics {dict(metrics)}): {dropped}look for rewards, "
        f"advantages, log-probs or weights that are not finite{loss.origin}"
    )
