"""The runtime: code that every service needs."""
