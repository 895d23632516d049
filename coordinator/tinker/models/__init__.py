"""Models that clients train, and the actor service that holds them."""
