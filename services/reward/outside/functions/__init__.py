"""Reward functions of the user's, each in worker processes of its own."""
