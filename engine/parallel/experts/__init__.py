"""Experts on their ranks (expert parallelism)."""
