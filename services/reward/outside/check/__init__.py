"""Calls a reward from outside with sample rows, and explains what is wrong with its answers."""
