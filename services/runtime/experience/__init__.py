"""Experience and published weights that a rank holds, serves and fetches."""
