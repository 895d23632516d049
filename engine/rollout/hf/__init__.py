"""The sampler of plain transformers."""
