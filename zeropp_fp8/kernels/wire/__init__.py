"""Tensors and what travels: payload rows, means of them, codes with shared scales."""
