"""The cost role."""
