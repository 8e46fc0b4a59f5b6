"""Whole tensors on one owner each (FP8-LM), instead of a slice of every tensor on every rank.

plan.py       which rank owns what: planning only
placement.py  which elements lie on which rank
gatherer.py   gathering from owners
stage3.py     what DeepSpeed's stage 3 assumes about slices, put right
"""
