"""What the coordinator serves to others."""
