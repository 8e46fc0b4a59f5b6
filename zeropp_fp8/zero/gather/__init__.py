"""Brings weights from the ranks' shards to the layer that computes with them, and drops them again."""
