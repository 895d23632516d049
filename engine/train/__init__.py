"""Gradients and optimizer steps."""
