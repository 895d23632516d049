"""HTTP: routes, what every one of them reads, and keys."""
