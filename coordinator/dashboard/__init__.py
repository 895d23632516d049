"""The page that an operator keeps open: static files, served as they are.

Hand-written HTML, CSS and ES modules without a build step; they talk to the REST routes alone.
"""
