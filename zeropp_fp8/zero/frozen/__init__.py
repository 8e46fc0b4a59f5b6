"""Frozen weights that rest as codes: in their shards, on the wire and between uses."""
