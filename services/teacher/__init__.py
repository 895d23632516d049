"""The teacher role."""
