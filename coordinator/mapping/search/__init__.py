"""Search for the cheapest placement, and seconds of placements that are given."""
