"""Ways for tensors to travel between processes."""
