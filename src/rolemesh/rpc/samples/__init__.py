"""Rows of a batch for people."""
