"""Calls of services: channels, deadlines, a method for each RPC."""
