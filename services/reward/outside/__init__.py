"""Rewards that somebody else gives: one client a protocol, and what is the same around them all.

Nothing in here imports torch.
"""
