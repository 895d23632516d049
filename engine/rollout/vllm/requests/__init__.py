"""What a vLLM engine is asked for, and what comes of it."""
