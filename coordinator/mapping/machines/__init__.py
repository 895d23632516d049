"""Machines: what devices and networks can do at most, and which share of it they reach."""
