"""Spreading of a model over ranks: process groups, tensor slices, stages, the data axis."""
