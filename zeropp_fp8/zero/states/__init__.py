"""Reduced gradients and optimizer states in low precision (FP8-LM).

groups.py                which slices share a flat buffer
gradient_store.py        reduced gradients at rest in FP8, with shared scales
block_gradient_store.py  the same with a scale per block
compressed.py            master weights and moments at rest, and their update
stored_gradients.py      a stage's gradients in such a store
states_at_rest.py        a stage's master weights and moments so
"""
