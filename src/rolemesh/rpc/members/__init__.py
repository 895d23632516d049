"""Who the members of a mesh are, and who vouches for them."""
