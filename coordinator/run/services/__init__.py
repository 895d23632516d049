"""Services of a run: started, registered, watched, and found lost."""
