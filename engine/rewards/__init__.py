"""Rewards that rolemesh brings along."""
