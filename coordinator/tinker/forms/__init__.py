"""Calls and answers, as JSON, as protobuf and as columns."""
