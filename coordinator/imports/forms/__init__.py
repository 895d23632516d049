"""Forms in which settings come: files, overrides of Hydra, command lines, shell scripts."""
