"""Trackers: they send the scalars of a run to services of others or to code of users."""
