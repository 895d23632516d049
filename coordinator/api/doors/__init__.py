"""Who may come in, and where."""
