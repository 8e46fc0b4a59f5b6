"""What the server imports that ranks are forked from, so that no rank has to."""

import contextlib
import gc
import importlib

NEEDED = (
    "torch._dynamo",
    "deepspeed.runtime.zero.stage3",
    "transformers.models.llama.modeling_llama",
    "models",
    "zeropp_fp8.compute",
    "zeropp_fp8.plugin",
    "zeropp_fp8.zero.linear",
    "zeropp_fp8.zero.stage3",
)
# Not every version of DeepSpeed has these.
IF_THERE = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.triton_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "peft",
)
for name in NEEDED:
    importlib.import_module(name)
for name in IF_THERE:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
# deepspeed.initialize collects garbage. In each rank that would visit half a million objects of imported modules, and
# copy the memory that they lie in: 1.5 s of 2 with four ranks on two cores.
gc.collect()
gc.freeze()
