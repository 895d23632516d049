"""Where the coordinator keeps what must outlive it."""
