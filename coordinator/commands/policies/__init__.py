"""Policies that commands serve and score: which one is meant, and the process that serves it."""
