"""The life of a run: from its services to its steps, checkpoints, records and end."""
