"""Weights on their way: manifest, checkpoint, export."""
