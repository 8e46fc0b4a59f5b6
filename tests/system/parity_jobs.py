"""Training jobs that run on ranks; kept apart from the tests so that ranks import little."""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace

import torch
from models import KEPT, Mlp, llama, section
from running import LEFT, Spec, allow_fp16_on_cpu, run, see, step, switch
from torch import nn

import zeropp_fp8


def train_llama(
    plugin,
    steps=30,
    dtype="fp32",
    zero_init=False,
    leaf=False,
    tie=False,
    recipe=None,
    fields=None,
    checkpointing=None,
    seed=0,
    layers=2,
    lora=False,
    detect=False,
    **overrides,
):
    """Train a small Llama; what is seen are its weights at start."""
    the_section = section(recipe, **(fields or {})) if plugin else None
    if detect:
        the_section and the_section.pop("topology")

    def adapted(model):
        if lora:
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(3)
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
            model.enable_input_require_grads()
        return model

    model = functools.partial(llama, layers=layers, tie=tie, seed=seed)
    spec = Spec(the_section, dtype, overrides, model, "adamw", 1e-2 if lora else 1e-3, zero_init, adapted)
    spec = replace(spec, leaves=("LlamaDecoderLayer",) * leaf)
    steps *= overrides.get("gradient_accumulation_steps", 1)
    left = ("weights", "masters", "bytes") if plugin else ("weights", "masters")
    return run(spec, [see(LEFT["weights"]), *[step] * steps], left)


def train_both(granularity, recipe="lossless", **options):
    """Stock (with leaf modules for `block`) and the plugin, one after the other in the same ranks."""
    importlib.import_module("torch._dynamo")  # zero.Init needs it imported before, see plugin.enable
    leaf = granularity == "block" and recipe == "lossless"
    stock = {"zero_optimization": KEPT, **options, "leaf": leaf, "detect": False}
    return train_llama(False, **stock), train_llama(
        True, recipe=recipe, fields={"gather_granularity": granularity}, **options
    )


def stock_plugin_stock(steps=3):
    """(stock, zeropp, stock again, whether every replaced name is restored)."""
    import deepspeed
    from deepspeed.runtime.zero.partition_parameters import Init

    switch(False)  # where the package is installed, its hook watches Init until then
    names = (deepspeed.DeepSpeedEngine.__init__, Init.__init__)
    first = train_llama(False, steps=steps)
    quantized = train_llama(True, recipe="zeropp", steps=steps)
    again = train_llama(False, steps=steps)
    restored = names == (deepspeed.DeepSpeedEngine.__init__, Init.__init__)
    return first, quantized, again, restored


def train_mlp(steps=10):
    """Losses of the linear stack: stock, lossless, and the ZeRO++ keys of DeepSpeed alone."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    data = [
        (torch.randn(8, 16, generator=generator), torch.randint(0, 16, (8,), generator=generator)) for _ in range(steps)
    ]
    keys = {"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}

    kinds = (
        (None, KEPT, False),
        (section("lossless", gather_granularity="module"), {}, True),
        (None, keys, True),
    )
    specs = [Spec(given, "fp32", {"zero_optimization": zero}, Mlp, lr=1e-2, plugin=on) for given, zero, on in kinds]
    return [run(spec, [step] * steps, data=data).losses for spec in specs]


VARIANTS = {
    "reentrant": {"checkpointing": "reentrant"},
    "non-reentrant": {"checkpointing": "non-reentrant"},
    "overlap off": {"zero_optimization": {"stage": 3, "overlap_comm": False, "contiguous_gradients": False}},
    "module": {"fields": {"gather_granularity": "module"}},
    "parameter": {"fields": {"gather_granularity": "parameter"}},
    "fp16": {"dtype": "fp16"},  # the last: it changes what the accelerator says of itself
}


def train_variants(steps=5):
    """{variant: losses} of zeropp, "plain" among them."""
    losses = {}
    for variant, options in {"plain": {}, **VARIANTS}.items():
        if options.get("dtype") == "fp16":
            allow_fp16_on_cpu()
        losses[variant] = train_llama(True, recipe="zeropp", steps=steps, **options).losses
    return losses


def train_quantized_with_everything(steps=6):
    """zeropp against stock with tied weights, accumulation, clipping and prefetching all at once."""
    importlib.import_module("torch._dynamo")
    options = {
        "steps": steps,
        "tie": True,
        "zero_init": True,
        "dtype": "bf16",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 30000,
            "stage3_prefetch_bucket_size": 60000,
            "stage3_max_live_parameters": 200000,
        },
    }
    stock = {**options, "zero_optimization": KEPT}
    return train_llama(False, **stock), train_llama(True, recipe="zeropp", **options)


def train_lora(checkpointing, zero_init, steps=4):
    """LoRA with stock, lossless and zeropp."""
    importlib.import_module("torch._dynamo")
    options = {"lora": True, "checkpointing": checkpointing, "zero_init": zero_init, "steps": steps}
    return (
        train_llama(False, zero_optimization=KEPT, **options),
        train_llama(True, recipe="lossless", **options),
        train_llama(True, recipe="zeropp", **options),
    )


class BranchyBlock(nn.Module):
    """A block with a branch that only some calls use, and a matrix that none does.

    The matrices are the block's own parameters, so that it is gathered as one at every granularity: ranks that gather
    different modules cannot work under ZeRO-3 at all.
    """

    def __init__(self):
        super().__init__()
        self.main, self.extra, self.never = (nn.Parameter(torch.randn(24, 24) / 5) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(24))

    def forward(self, x, use_extra):
        y = torch.tanh(x @ self.main)
        return y + (y @ self.extra) * self.gain if use_extra else y


class Branchy(nn.Module):
    """Two blocks; each call says whether this rank takes the branches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([BranchyBlock() for _ in range(2)])
        self.gain = nn.Parameter(torch.ones(24))
        self.head = nn.Linear(24, 4)

    def forward(self, x, use_extra):
        for block in self.blocks:
            x = block(x, use_extra)
        return self.head(x * self.gain if use_extra else x).square().mean()


def train_branchy(runs, steps=3):
    """Ranks differ in what they use. Of each (recipe, fields): the gradient-trained weights, this rank's report, and
    on rank 1 that of all ranks."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(5 + rank)
    data = [(torch.randn(3, 24), (rank + number) % 2 == 0) for number in range(steps)]

    def reports(engine):
        return zeropp_fp8.wire_report(engine), zeropp_fp8.wire_report(engine, total=True) if rank == 1 else None

    specs = [Spec(section(recipe, **fields), model=Branchy, optimizer="sgd", lr=0.5) for recipe, fields in runs]
    traces = [run(spec, [*[step] * steps, see(reports)], ("weights",), data) for spec in specs]
    return [(trace.weights, *trace.seen[0]) for trace in traces]


def branchy_reference(steps=3, world=4):
    """The same training in one process, the mean over ranks written out."""
    model = Branchy()
    inputs = []
    for rank in range(world):
        torch.manual_seed(5 + rank)
        inputs.append([torch.randn(3, 24) for _ in range(steps)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            (model(inputs[rank][number], use_extra=(rank + number) % 2 == 0) / world).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}
