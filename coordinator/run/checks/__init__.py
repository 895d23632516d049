"""Checks of a recipe before the first process of its run is started."""
