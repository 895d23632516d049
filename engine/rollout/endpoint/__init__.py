"""Calls of programs from outside, sampled beside the calls of a run."""
