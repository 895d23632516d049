"""Messages by libraries that connect a group of ranks."""
