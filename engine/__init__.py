"""Numbers: models, losses, rollout, weights. Knows no gRPC, no Redis and no recipe."""
