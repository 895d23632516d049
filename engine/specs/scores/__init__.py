"""Who judges rows: rewards, and teachers."""
