"""Data of a run: sources of prompts and trajectories, and their order."""
