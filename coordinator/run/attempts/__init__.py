"""Attempts of a run: from meeting its services to its end, or to what makes another one needed."""
