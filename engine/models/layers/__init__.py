"""What of a decoder's layers is computed otherwise than transformers does."""
