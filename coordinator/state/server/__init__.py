"""A Valkey server of the run's own, which ends with it."""
