"""Files that start a mesh on an engine that a user has, made from a recipe."""
