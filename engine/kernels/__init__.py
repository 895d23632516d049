"""Kernels in Triton for GPUs; what each computes is said, and held, by a reference in torch."""
