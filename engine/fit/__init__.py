"""Memory of a rank: counted while the real trainer runs, with values or without."""
