"""Losses of a mini-batch."""
