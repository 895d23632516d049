"""Rewards from outside: one client for each protocol, and the code around all of them.

Nothing in here imports torch.
"""
