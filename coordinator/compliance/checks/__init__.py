"""The checks, by the service that they are about."""
