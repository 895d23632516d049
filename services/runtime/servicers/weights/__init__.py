"""Weights and cuts of what a role trains."""
