"""Evaluation of a policy behind a URL: rows of tasks, how they are asked, and what scores say.

No torch, and nothing of a run.
"""
