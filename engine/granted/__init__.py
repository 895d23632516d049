"""What a process may read, call and ask because its owner has granted it."""
