"""Runs in virtual time: the real coordinator over services that only say what they would do.

What is real: graph, pools, leases, samplers, keys, journal, cuts, watcher, replacing and recovery.
What is simulated: the far end of every channel, and the clock.
"""
