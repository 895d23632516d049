"""The algorithm's section, and what it needs of the rest of a recipe."""
