"""Folders of runs, read while a run goes on and afterwards."""
