"""Episodes: turns of a policy and an environment, played side by side."""
