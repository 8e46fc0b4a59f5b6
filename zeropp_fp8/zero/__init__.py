"""ZeRO-3 with this project's collectives: what stands between DeepSpeed's stage 3 and `comm/`.

session.py       what one engine shares: configuration, topology, formats, ledger, generators
blocks.py        finding the transformer blocks of a model
units.py         the units in which parameters are gathered together
trace.py         in which order a step fetches them
coordinator.py   when they are fetched, fetched ahead and released
adopted.py       what an engine keeps on a parameter, and lists that hold parameters of several engines
weights.py       how: payloads, hops, secondary shards, the closures put on each parameter
operands.py      weights whose gathered bytes are the operand of a GEMM
order.py         the one order in which gradients are reduced on every rank
gradients.py     reducing a unit of gradients
linear.py        ZeRO-3's linear function at less host cost
fused_update.py  torch's fused Adam where the user left the choice to torch
activations.py   FP8 exchanges of DeepSpeed's sequence parallelism
offload.py       subclass of DeepSpeedZeRoOffload (all there is without an optimizer)
stage3.py        subclass of DeepSpeedZeroOptimizer_Stage3, on top of the two below
report.py        the table printed at start

The frozen store, weights that rest as codes:

frozen_store.py       a stored parameter: to codes and back, gathering, writing, errors
frozen_selection.py   which weights are stored, while a model is made and when an engine is
frozen_init.py        deepspeed.zero.Init that stores, and gathers each parameter through its engine
frozen_operands.py    FP8 operands straight from codes
frozen_checkpoint.py  saving and loading codes
fragment.py           what a checkpoint holds of a stored parameter
saved_ranks.py        reading what other ranks have saved
merged.py             a 16-bit model with adapters merged in
shard_writer.py       Hugging Face files, one shard at a time

Generation inside an engine that trains:

resident.py    weights that stay on a rank: values, or codes
generation.py  the context: hooks aside, adapters merged, evaluation

FP8-LM, gradients and states in low precision:

gradient_scales.py       scales that all ranks share, and mu
state_groups.py          which slices share a flat buffer
gradient_store.py        reduced gradients at rest, with shared scales
block_gradient_store.py  the same with a scale a block
compressed_states.py     master weights and moments at rest, and their update
low_precision.py         both inside DeepSpeed's stage 3

Parameters with owners instead of slices:

whole_tensor.py  which rank owns what: planning only
placement.py     slices or owners: which elements lie on which rank
whole_weights.py gathering from owners
whole_stage3.py  what DeepSpeed's stage 3 assumes about slices, put right
"""
