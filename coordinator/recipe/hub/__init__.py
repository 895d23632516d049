"""Models and data by their names at the Hugging Face hub."""
