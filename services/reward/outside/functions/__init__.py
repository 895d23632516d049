"""Reward functions of users, each in its own worker processes."""
