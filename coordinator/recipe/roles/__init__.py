"""The sections of roles: where each stands, and what its services get."""
