"""Where the scalars of a run go beside its own files: the services of others, and users' own."""
