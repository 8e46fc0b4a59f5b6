"""Whole tensors on one owner each (FP8-LM), instead of a slice of every tensor on every rank."""
