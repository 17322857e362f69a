"""Tensor kernels: signatures, plain-torch references, and their fast forms."""
