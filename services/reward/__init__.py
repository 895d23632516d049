"""The reward role."""
