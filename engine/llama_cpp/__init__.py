"""Models as GGUF files, which llama.cpp serves."""
