"""Sections about the run, and not about a role."""
