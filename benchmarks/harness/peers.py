"""ZeRO-3 of all kinds and FSDP on one model of transformers: what this project is compared with between nodes.

Each builds its engine and gives step(*tokens) -> loss (tokens of a micro-batch each), session (what `wire_of` takes, or
None) and close().

    stock-zero2              DeepSpeed ZeRO-2
    stock, stock-leaf        DeepSpeed ZeRO-3; with every decoder layer as a z3 leaf module
    lossless, zeropp, ...    ZeRO-3 with this project's recipes (FP8 compute where the recipe says so)
    zeropp-world, ...        the same, each micro-batch's gradients reduced to the end
    zeropp-compiled, ...     the same, decoder layers compiled by torch.compile
    lossless-exact           `lossless` with `"weights": {"difference": "exact"}` and a copy in each node
    zeropp-whole, ...        with `"difference": "none"`: `zeropp` and `fp8-lm-zeropp`
    zeropp-used, ...         `zeropp` and `lossless` with `"experts": {"gather": "used"}`, of mixtures
    zeropp-owners, ...       `zeropp` and `zeropp-exact` with tensors that have one owner each
    zeropp-muon, ...         the same with Muon, at 20 times the learning rate of AdamW for the others
    stock-muon               DeepSpeed's own Muon with ZeRO-3
    in-tree, in-tree-leaf    DeepSpeed's own ZeRO++ (quantized weights and gradients, hpZ in a node); GPUs only
    fsdp2, hsdp              fully_shard over all ranks; sharded in a node and replicated between nodes, which is
                             reduced over once per step
    fsdp2-torchao            fully_shard of torchao's float8 training: a scale per tensor, weights gathered in FP8
    fsdp2-compiled, ...      the same, decoder layers compiled
    fsdp2-zeropp, ...        fully_shard with this project's collectives, over all ranks
    hsdp-zeropp, ...         the same with a copy in each node
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn
from torch.profiler import record_function

from benchmarks.harness.environment import build_in_tree_op, forget_in_tree_groups
from benchmarks.harness.hf_llama import maker_of
from benchmarks.harness.profiling import BACKWARD, FORWARD, UPDATE
from benchmarks.harness.sizes import EVERY_SIZE
from benchmarks.harness.zero3 import in_tree_zero

QUANTIZED = ("zeropp", "zeropp-4bit")
EXACT = {"lossless-exact": {"recipe": "lossless", "secondary": {"scope": "node"}, "weights": {"difference": "exact"}}}
WHOLE = {
    f"{recipe}-whole": {"recipe": recipe, "weights": {"difference": "none"}} for recipe in ("zeropp", "fp8-lm-zeropp")
}
USED = {f"{recipe}-used": {"recipe": recipe, "experts": {"gather": "used"}} for recipe in ("lossless", "zeropp")}
# Tensors with one owner each, and there also Muon instead of AdamW; `stock-muon` is DeepSpeed's own.
OWNERS = {
    f"{recipe}-{suffix}": {"recipe": recipe, "partition": "whole_tensor"}
    for recipe in ("zeropp", "zeropp-exact")
    for suffix in ("owners", "muon")
}
STOCK_MUON = "stock-muon"
IN_FP8 = ("fp8-lm-o1", "fp8-lm", "fp8-lm-zeropp")
# Gradients of each micro-batch are sent between nodes.
WORLD = {f"{recipe}-world": {"recipe": recipe, "gradients": {"accumulate_in": "world"}} for recipe in QUANTIZED}
ONE_NODE_RUNS = ("stock-zero2", "zeropp-pcie")  # what one node without NVLink is for, or trains with
RECIPES = ("lossless", *QUANTIZED, "zeropp-exact", "zeropp-pcie", *IN_FP8)
_EAGER = {recipe: {"recipe": recipe} for recipe in RECIPES} | EXACT | WHOLE | OWNERS
COMPILED = {f"{run}-compiled": {**section, "compile": "blocks"} for run, section in _EAGER.items()}
SECTIONS = {**_EAGER, **WORLD, **USED, **COMPILED}
IN_TREE = ("in-tree", "in-tree-leaf")
TORCHAO = ("fsdp2-torchao", "fsdp2-torchao-compiled")
# The project's collectives under fully_shard, by recipe.
UNDER_FSDP = {
    f"{kind}-{recipe}": recipe for kind in ("fsdp2", "hsdp") for recipe in ("lossless", "zeropp", "zeropp-exact")
}
UNDER_FSDP |= {f"{run}-compiled": recipe for run, recipe in UNDER_FSDP.items()}
FSDP = ("fsdp2", "hsdp", "fsdp2-compiled", "hsdp-compiled", *TORCHAO, *UNDER_FSDP)
RUNS = ("stock-zero2", "stock", "stock-leaf", STOCK_MUON, *SECTIONS, *FSDP, *IN_TREE)
MODELS = ("1.3b", "small", "tiny", "4b-moe", "small-moe", "tiny-moe")
LR = 1e-4
STOCK_LINEAR = torch.nn.functional.linear  # torch's own, before ZeRO-3 replaces it


def build_model(name: str, device: torch.device) -> nn.Module:
    """A Llama or a mixture with transformers' own random weights."""
    torch.manual_seed(0)
    with device:
        return maker_of(EVERY_SIZE[name])()


def make_optimizer(model, lr: float):
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=next(model.parameters()).is_cuda)


def uses_muon(run: str) -> bool:
    return "-muon" in run


def ds_config(run: str, args, lr: float = LR) -> dict:
    zero = {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": int(1e8),
        "stage3_prefetch_bucket_size": int(1e8),
        "stage3_max_live_parameters": int(2e8),
        "stage3_max_reuse_distance": int(2e8),
    }
    if EVERY_SIZE[args.model].small:  # it would stay gathered: every tensor is below these limits
        zero |= {
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        }
    if run == "stock-zero2":
        zero = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": int(1e8)}
    if run in IN_TREE:
        zero |= in_tree_zero(int(os.environ["LOCAL_WORLD_SIZE"]))
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    if uses_muon(run):
        config["optimizer"] = {"type": "Muon", "params": {"lr": 20 * lr, "adam_lr": lr, "torch_adam": True}}
    if run == STOCK_MUON:
        zero["reduce_scatter"] = False
    if run in SECTIONS:
        config["zeropp_fp8"] = {**SECTIONS[run], "report": {"every": 0, "diagnose": False}}
    return config


def wire_of(session) -> dict:
    """Bytes per step of all ranks together, of what a run has as its session."""
    import zeropp_fp8
    from zeropp_fp8 import fsdp2

    report = fsdp2.wire_report if hasattr(session, "reshard") else zeropp_fp8.wire_report
    return report(session, total=True)


class DeepSpeedRun:
    """ZeRO-3: stock, with leaf modules, with DeepSpeed's own ZeRO++, or with the plugin."""

    def __init__(self, run: str, args, device, lr: float):
        import deepspeed

        import zeropp_fp8

        if run in IN_TREE:
            build_in_tree_op()
        zeropp_fp8.enable() if run in SECTIONS else zeropp_fp8.disable()
        forget_in_tree_groups()
        model = build_model(args.model, device)
        if run.endswith("-leaf"):
            deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0])])
        optimizer = None if uses_muon(run) else make_optimizer(model, lr)
        config = ds_config(run, args, lr)
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        self.session = self.engine if run in SECTIONS else None

    def step(self, *micro_batches):
        for tokens in micro_batches:
            with record_function(FORWARD):
                loss = self.engine(input_ids=tokens, labels=tokens).loss
            with record_function(BACKWARD):
                self.engine.backward(loss)
            with record_function(UPDATE):
                self.engine.step()
        return loss

    def close(self) -> None:
        import zeropp_fp8

        self.engine.destroy()
        self.engine = self.session = None
        zeropp_fp8.disable()


class FsdpRun:
    """FSDP2 over all ranks, or (hsdp) sharded inside a node and replicated between nodes."""

    session = None

    def __init__(self, run: str, args, device, lr: float):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        # ZeRO-3 replaces it for good with a Python function that saves memory; FSDP must not pay for that.
        torch.nn.functional.linear = STOCK_LINEAR
        world, per_node = torch.distributed.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
        copies = run.startswith("hsdp")
        if copies:
            shape, names = (world // per_node, per_node), ("replicate", "shard")
        else:
            shape, names = (world,), ("shard",)
        reduce_dtype = torch.bfloat16 if args.fsdp_reduce_dtype == "bf16" else torch.float32
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        options = {
            "mesh": mesh["shard"] if run in UNDER_FSDP else mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype),
        }
        self.model = build_model(args.model, device)
        self.after_step = lambda model: None
        if run in TORCHAO:
            self.after_step = in_float8(self.model, device)
        for layer in self.model.model.layers:
            if run.endswith("-compiled"):
                layer.compile()
            fully_shard(layer, reshard_after_forward=True, **options)
        fully_shard(self.model, **options)  # by default the root stays gathered: backward needs it at once
        if run in UNDER_FSDP:
            from zeropp_fp8 import fsdp2

            replicate = mesh["replicate"] if copies else None
            fsdp2.apply(self.model, UNDER_FSDP[run], per_node, replicate, report={"every": 0})
            self.session = self.model
        if device.type == "cpu":  # gloo has no mean
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        self.optimizer = make_optimizer(self.model, lr)

    def step(self, *micro_batches):
        for index, tokens in enumerate(micro_batches):
            self.model.set_requires_all_reduce(index == len(micro_batches) - 1)
            with record_function(FORWARD):
                loss = self.model(input_ids=tokens, labels=tokens).loss
            with record_function(BACKWARD):
                (loss / len(micro_batches)).backward()
        with record_function(UPDATE):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.after_step(self.model)
            self.optimizer.zero_grad()
        return loss

    def close(self) -> None:
        self.model = self.optimizer = self.session = None


def in_float8(model: nn.Module, device: torch.device) -> Callable[[nn.Module], None]:
    """Let linear layers train in FP8 by torchao, gathered in FP8 too; returns what is to be called after each step."""
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=device.type == "cpu")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: "lm_head" not in name)
    return precompute_float8_dynamic_scale_for_fsdp


def made(run: str, args, device: torch.device, lr: float = LR) -> DeepSpeedRun | FsdpRun:
    """The training of a run, at a learning rate."""
    return (FsdpRun if run in FSDP else DeepSpeedRun)(run, args, device, lr)
