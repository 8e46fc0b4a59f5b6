"""Imports of the server that ranks are forked from, so that no rank has to import."""

import contextlib
import functools
import gc
import importlib
import pkgutil
import sys

import deepspeed
import torch

import zeropp_fp8.zero
from tests.places import ROOT, TESTS, WITH_RANKS
from zeropp_fp8.plugin import install

NEEDED = (
    "torch._dynamo",
    "deepspeed.runtime.zero.stage3",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "tests.models",
    "zeropp_fp8.compute",
    "zeropp_fp8.plugin",
    *(module.name for module in pkgutil.walk_packages(zeropp_fp8.zero.__path__, "zeropp_fp8.zero.")),
    *("dpo", "evaluate", "grpo", "ppo", "reward", "sft"),  # the RLHF examples
)
# Not every version of DeepSpeed has these.
IF_THERE = (
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.triton_ops",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.sequence_parallel.ulysses_sp",
    "deepspeed.sequence.fpdt_layer",
    "peft.utils.transformers_weight_conversion",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
)
RLHF = ROOT / "examples" / "rlhf"
FOLDERS = (TESTS, *WITH_RANKS, RLHF.parent, RLHF, RLHF / "tests")
sys.path += map(str, FOLDERS)  # benchmarks start ranks too, without pytest
for name in (*NEEDED, *(path.stem for folder in FOLDERS for path in sorted(folder.glob("*_jobs.py")))):
    importlib.import_module(name)
for name in IF_THERE:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
with contextlib.suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # the first time, for any model, it compiles 900 regular expressions
# Asked for the first time, this runs compilers to see which ops they could build: in each rank, that was a quarter of a
# short job. On one host DeepSpeed would prefer its own communication through shared memory, which has to be compiled.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# DeepSpeed formats every parameter for messages that it does not print: else a tenth of a short job.
torch.nn.Parameter.__repr__ = object.__repr__
# It marks ranges for NVIDIA's profiler around each of its functions, hundreds a step. Nobody profiles ranks on the CPU.
deepspeed.utils.nvtx.enable_nvtx = False
# torch.manual_seed also keeps the seed for kinds of devices that may be used later, with the caller's stack as text.
# Ranks are on the CPU.
for kind in (torch.cuda, torch.xpu, torch.mtia):
    kind.manual_seed_all = lambda seed: None
# Each rank would look through the methods of DeepSpeed's classes again, 10 ms.
install.verify = functools.cache(install.verify)
install.verify()
# deepspeed.initialize collects garbage. In each rank that would visit half a million objects of imported modules, and
# copy the memory that they lie in: 1.5 s of 2 with four ranks on two cores.
gc.collect()
gc.freeze()
