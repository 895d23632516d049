"""A call from its key to its answer: the hold of a run, the compute thread, the runtime."""
