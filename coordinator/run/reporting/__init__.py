"""Reports of a run to its store, and the wishes of its users that it finds there."""
