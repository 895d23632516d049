"""Samplers, and whom a policy talks to."""
