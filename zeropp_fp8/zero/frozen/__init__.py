"""Frozen weights that are stored as codes, and sent as they are stored."""
