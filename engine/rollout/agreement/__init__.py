"""Checks that a sampler computes with the weights that it was given."""
