"""Records of files: JSON lines and tables."""
