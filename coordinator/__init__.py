"""The single controller. Holds references, never tensors."""
