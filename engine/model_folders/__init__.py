"""What Hugging Face folders say of a model, without its weights."""
