"""Adapters beside a base that others may share."""
