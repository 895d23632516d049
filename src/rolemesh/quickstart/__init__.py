"""Props of the quickstart and of the recipes: a small model, a judge of form, examples of sums."""
