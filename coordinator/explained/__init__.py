"""Explanations of what users read: keys of a recipe, metrics, and how a recipe shows them."""
