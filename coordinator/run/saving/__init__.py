"""State that a run goes on from: its progress, cuts of each step, and checkpoints."""
