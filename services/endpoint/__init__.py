"""The policy as an endpoint: HTTP in front of a sampler, with sessions that remember tokens."""
