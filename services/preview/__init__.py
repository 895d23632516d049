"""A look at what the services of a recipe would work with, without a model."""
