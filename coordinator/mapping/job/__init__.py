"""The job: what a recipe asks to be placed, with its models, rows and calls."""
