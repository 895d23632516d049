"""Values of the others as those of a recipe: units, choices, places."""
