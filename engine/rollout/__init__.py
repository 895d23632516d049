"""Sampling back ends behind one interface."""
