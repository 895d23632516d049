"""The sampler with vLLM in the rank's own process."""
