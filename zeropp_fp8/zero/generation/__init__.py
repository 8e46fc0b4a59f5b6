"""Generation inside an engine that trains.

resident.py  weights that stay on a rank: their values, or their codes
context.py   the context: hooks aside, adapters merged, evaluation
"""
