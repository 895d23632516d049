"""What a start reads of large files: in parts, and once for all later starts."""
