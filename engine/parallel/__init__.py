"""How a model is cut over ranks: process groups, tensor slices, stages, the data axis."""
