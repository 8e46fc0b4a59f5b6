"""The path of a gradient from autograd to the rank that keeps its mean."""
