"""Executable contract: holds a server of any make to what the protos say of its role."""
