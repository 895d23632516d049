"""Evaluation of a policy that answers behind a URL: asks it, and scores what it says."""
