"""Reduced gradients and optimizer states in low precision (FP8-LM).

groups.py                which slices share a flat buffer
gradient_store.py        reduced gradients at rest in FP8, with shared scales
block_gradient_store.py  the same with a scale a block
compressed.py            master weights and moments at rest, and their update
stage3_gradients.py      the part of a stage with such gradients
stage3_states.py         the part of a stage with such states
stage3_at_rest.py        what both share
"""
