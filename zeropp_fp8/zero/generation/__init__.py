"""Generation inside an engine that trains.

layers.py    which layers are linear, or LoRA around a linear one, and nothing else
adapters.py  such a LoRA layer in one forward
codes.py     what a gather brings, to keep it and multiply with it
resident.py  weights that stay on a rank: their values, or their codes
replayed.py  the decoding step as a CUDA graph
context.py   the context: hooks aside, adapters merged, evaluation
"""
