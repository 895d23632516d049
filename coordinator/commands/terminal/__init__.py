"""The terminal: what commands show there, the options that they share, how they end."""
