"""Evaluation of a policy behind a URL: rows of tasks, and how they are asked and played.

Without torch, but for episodes: those are played by what samples in a run.
"""
