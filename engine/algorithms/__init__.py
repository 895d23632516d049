"""Closed formulas of RL post-training, each with its source."""

# A loss is found by its spec once its module was imported: see `losses.loss_for`.
from rolemesh.engine.algorithms import preference_losses as preference_losses
