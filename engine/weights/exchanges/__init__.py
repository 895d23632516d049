"""Weights on their way to another service."""
