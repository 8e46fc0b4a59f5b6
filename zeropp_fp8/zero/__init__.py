"""ZeRO-3 with this project's collectives: the layer between DeepSpeed's stage 3 and `comm/`.

Modules that all features share:

session.py          the context of one engine: config, topology, formats, ledger; fixed at start
memory.py           how much memory a rank has, and how much of it is free
placement.py        which elements of a parameter lie on which rank
offload.py          subclass of DeepSpeedZeRoOffload: the hooks around modules (all that engines without optimizer have)
stage3.py           subclass of DeepSpeedZeroOptimizer_Stage3, and which object answers which of its methods
as_deepspeed.py     gradients, states and the layout of shards as DeepSpeed stores them
looking.py          DeepSpeed's safe_get_* and safe_set_*
stage_part.py       the interface between a stage and a feature of training
compute_scaling.py  the part for compute formats of linear layers
extra_state.py      the state of all parts in a checkpoint, beside weights and optimizer states
report.py           the table printed at start
telemetry.py        all numbers of an engine, for reports, logs and progress lines
bound.py            measures once what limits a step's time
fall_back.py        switches a running or resumed job to high precision
holders.py          finds the engine behind an engine, its module or a Trainer
fragment.py         the form in a checkpoint of a weight that is stored as codes
linear_function.py  ZeRO-3's linear function with less host time
compiled.py         torch.compile: blocks are compiled, hooks are never traced
attachment.py       several engines over one model: one of them has its hooks and attributes on it
ulysses.py          FP8 exchanges of DeepSpeed's sequence parallelism

The folders; the docstring of each explains it:

gather/      weights: from shards to layers
reduce/      gradients: from autograd to the rank that keeps the mean
states/      gradients and optimizer states in low precision
frozen/      frozen weights that are stored as codes
owners/      whole tensors on one owner each
generation/  generation inside an engine that trains
export/      the whole model in Hugging Face's format
handover/    sends the whole model, or its changes, to an engine that generates elsewhere
checkpoint/  saves in two phases, and checks what is loaded
"""
