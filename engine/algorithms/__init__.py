"""Closed formulas of RL post-training, each with its source."""
