"""Weights of a training engine for an engine that generates elsewhere."""
