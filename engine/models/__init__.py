"""Hugging Face models with what training needs of them."""
