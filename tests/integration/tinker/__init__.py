"""Tests of the server of Tinker's protocol, over a real actor service."""
