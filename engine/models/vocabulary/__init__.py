"""Log-probs of tokens, straight from hidden states."""
