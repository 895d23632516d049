"""One client for each protocol."""
