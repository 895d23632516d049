"""Role calls as a graph of futures: what runs when, on which service, and what it leaves."""
