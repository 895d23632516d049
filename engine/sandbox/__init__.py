"""Sandboxes in which functions of users run: what they see, and the means that this host has."""
