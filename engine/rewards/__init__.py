"""Rewards that come with rolemesh."""
