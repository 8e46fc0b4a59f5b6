"""Products with weights that lie as codes."""
