"""Tinker's training protocol: what its clients send, read, and what they want for an answer."""
