"""Cuts: the state of a trainer after a step, in shared memory."""
