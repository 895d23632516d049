"""The making of steps: generation ahead, health, evaluation, and who is told."""
