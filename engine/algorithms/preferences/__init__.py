"""Losses on given data, and the pairs that they compare."""
