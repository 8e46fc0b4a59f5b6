"""ZeRO-3 with this project's collectives: what stands between DeepSpeed's stage 3 and `comm/`.

What all share:

session.py          what one engine shares: configuration, topology, formats, ledger; fixed at start
memory.py           how much memory a rank has, and can still have
placement.py        which elements of a parameter lie on which rank
offload.py          subclass of DeepSpeedZeRoOffload: the hooks around modules (all there is without an optimizer)
stage3.py           subclass of DeepSpeedZeroOptimizer_Stage3: which of its methods who answers
as_deepspeed.py     gradients, states and the layout of shards as DeepSpeed has them
looking.py          DeepSpeed's safe_get_* and safe_set_*
stage_part.py       a feature of training as a stage knows it
compute_scaling.py  what linear layers compute in, as such a part
held_weights.py     what nodes hold of weights for differences, as such a part
extra_state.py      what a checkpoint holds of the parts, beside weights and states
report.py           the table printed at start
telemetry.py        all numbers of an engine, for reports, logs and lines
bound.py            what bounds a step, measured once
fall_back.py        giving up low precision while a job runs, and when it resumes
holders.py          the engine behind what a script holds: an engine, its module, a Trainer
fragment.py         what a checkpoint holds of a weight that rests as codes
linear_function.py  ZeRO-3's linear function at less host cost
compiled.py         torch.compile: blocks between hooks that are never traced
turns.py            several engines over one model: whose hooks and attributes are on it
ulysses.py          FP8 exchanges of DeepSpeed's sequence parallelism

The wings, each with its way in its own docstring:

gather/      weights: from shards to layers
reduce/      gradients: from autograd to the rank that keeps the mean
states/      gradients and optimizer states in low precision
frozen/      frozen weights that rest as codes
owners/      whole tensors on one owner each
generation/  generating inside an engine that trains
export/      the whole model in Hugging Face's format
handover/    the whole model, or what has changed of it, to an engine that generates elsewhere
checkpoint/  saving in two phases, and checking what is loaded
"""
