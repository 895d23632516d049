"""Models, what is trained of them, and how."""
