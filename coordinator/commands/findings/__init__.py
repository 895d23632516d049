"""Findings: what doctor and check look at before a run, and what to do about it."""
