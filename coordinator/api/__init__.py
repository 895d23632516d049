"""Interfaces of the coordinator for others: gRPC, REST and alerts."""
