"""A vLLM engine: its settings, its process, its ranks, its first weights."""
