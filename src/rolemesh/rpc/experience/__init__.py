"""Rows and tensors on the wire: columns, references, streams of bytes."""
