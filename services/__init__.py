"""The roles as processes that serve rolemesh.v1."""
