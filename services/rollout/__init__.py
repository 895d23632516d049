"""The rollout role: samples apart from the trainer."""
