"""From turns to tokens, and how many these are."""
