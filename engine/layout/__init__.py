"""Arithmetic of layouts, without torch: ranks, families of models, parameters, boxes."""
