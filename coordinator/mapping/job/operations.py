"""Operations of a step's passes: what their products multiply, without what else they do."""

from __future__ import annotations

from rolemesh.coordinator.mapping.job.models import Model
from rolemesh.coordinator.mapping.job.work import Work


def scoring_flops(model: Model, work: Work) -> float:
    """Of a forward pass over all rows, whose head is computed for completions alone.

    Example: two completions of 4 tokens behind one prompt of 10 take 2 x 18 operations for each
    matrix parameter of the layers, and 2 x 8 for each of a head over the vocabulary.
    """
    layers, head = _forward(model, work, work.rows)
    return layers + head


def update_flops(model: Model, work: Work, *, recomputes: bool = False) -> float:
    """Of all optimizer steps of an update.

    A backward pass multiplies with weights and with activations, with an adapter's frozen weights
    once. The head's makes its logits again, but for a pass's last ones, which are not counted
    apart; and layers that are recomputed make one forward pass more.
    """
    rows = min(work.rows, work.mini_batch_rows)
    layers, head = _forward(model, work, rows)
    tokens = work.computed_tokens(rows)
    is_head_trained = model.shape.adapter is None or model.trained_head_parameters > 0
    in_head = (2 if is_head_trained else 1) * 2 * tokens * model.head_parameters
    backward = model.backward_flops(tokens, work.context) - in_head
    one = (2 if recomputes else 1) * layers + backward + (4 if is_head_trained else 3) * head
    return one * work.epochs * work.rows / rows


def _forward(model: Model, work: Work, rows: int) -> tuple[float, float]:
    """Operations of a forward pass in the layers and in the head."""
    tokens, predicted = work.computed_tokens(rows), rows * work.completions.mean
    layers = model.forward_flops(tokens, work.context) - 2 * tokens * model.head_parameters
    return layers, 2 * predicted * model.head_parameters
