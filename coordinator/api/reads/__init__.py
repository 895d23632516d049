"""What a coordinator tells of runs, from the store and from their folders."""
