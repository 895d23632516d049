"""Advantages, returns and pairs of a batch, from its rewards."""
