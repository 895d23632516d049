"""Recipes made of settings of other systems, by one table of facts that is also a page."""
