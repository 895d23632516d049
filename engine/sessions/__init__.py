"""Sessions: what a policy was asked by programs that own their loop, kept token for token."""
