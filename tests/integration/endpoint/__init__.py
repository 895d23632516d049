"""A package, so that its engine is closed when its last test has run."""
