"""Tensors and what is sent of them: payload rows, means of them, codes with shared scales."""
