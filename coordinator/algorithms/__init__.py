"""RL algorithms: one short function each."""
