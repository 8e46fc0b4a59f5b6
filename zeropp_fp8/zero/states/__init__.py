"""Reduced gradients and optimizer states in low precision (FP8-LM)."""
