"""Gradients of ranks, and the steps that are made of them."""
