"""RPCs that several roles share."""
