"""Reduced gradients and optimizer states in low precision (FP8-LM), and torch's fused update where they are not.

groups.py                which slices share a flat buffer
gradient_store.py        reduced gradients at rest in FP8, with shared scales
block_gradient_store.py  the same with a scale a block
compressed.py            master weights and moments at rest, and their update
stage3.py                both inside DeepSpeed's stage 3
fused_update.py          torch's fused Adam where the user left the choice to torch
"""
