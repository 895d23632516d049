"""New weights and adapters for a vLLM engine."""
