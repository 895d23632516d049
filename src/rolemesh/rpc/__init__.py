"""The hand-written half of the wire: policies, channels, errors, raw payload streams."""
