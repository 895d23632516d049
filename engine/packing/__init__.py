"""Packing of rows into micro-batches: balanced over ranks, in a token budget, as trees."""
