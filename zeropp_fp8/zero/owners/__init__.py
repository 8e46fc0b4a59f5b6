"""Whole tensors on one owner each (FP8-LM), instead of a slice of every tensor on every rank.

plan.py       which rank owns what: planning only
loads.py      what ranks have to do by a plan, evened out
placement.py  which elements lie on which rank
unit.py       a storage (gather/): each rank sends what it owns
slices.py     numbers from owners' parts to DeepSpeed's slices, and back
layout.py     what a stage puts right of what DeepSpeed's assumes about slices
"""
