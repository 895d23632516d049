"""Self-tuning: which settings a run tries, and which it goes on with."""
