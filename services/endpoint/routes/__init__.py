"""Routes beside vLLM's own front, and what they check and translate."""
