"""HTTP servers of the mesh."""
