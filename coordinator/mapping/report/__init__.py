"""Reports of a found plan: for people, for programs and as settings of a recipe."""
