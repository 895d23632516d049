"""Weights on disk: checkpoints and exports."""
