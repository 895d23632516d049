"""Environments: what a policy talks to while it is sampled."""
