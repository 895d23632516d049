"""Messages through memory that both ranks reach."""
