"""In which order rows are trained."""
