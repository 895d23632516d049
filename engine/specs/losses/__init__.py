"""Losses: of sampled completions, of given data, of values and of sums."""
