"""DeepSpeed's own features: stock, `lossless` and `zeropp` train with one of them, in turn on the same ranks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import utils as ds_utils
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from models import batches, build, ds_config, full_weights, llama, section
from running import Spec, allow_fp16_on_cpu, forward_backward, run, see, shared_folder, step, stepped
from token_drop_jobs import KEYS as TOKEN_DROP
from token_drop_jobs import by_token_drop
from torch import nn

from zeropp_fp8.comm import all_gather

CPU = {"device": "cpu"}
MODULE = {"gather_granularity": "module"}  # with it `lossless` is stock's ZeRO-3 bit for bit
EXACT_GRADIENTS = {"gradients": {"intra_format": "none", "inter_format": "none"}}


def trained(engine, steps=3, data_rank=None):
    """The loss of each step."""
    rank = dist.get_rank() if data_rank is None else data_rank
    return [stepped(engine, tokens) for tokens in batches(steps, rank)]


# -- models --------------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    """A Llama whose maker enters zero.Init by itself, inside of the user's."""

    def __init__(self, config):
        super().__init__()
        self.inner = build(llama, config, zero_init=True)
        self.scale = nn.Parameter(torch.ones(5))

    def forward(self, **inputs):
        output = self.inner(**inputs)
        output.loss = output.loss * self.scale.mean()
        return output


def init_with(**options):
    def make(config):
        with deepspeed.zero.Init(config_dict_or_path=config, **options):
            return llama()

    return make


def init_of_a_model(config):
    model = llama()
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    return model


def init_from_a_file(config):
    """zero.Init and deepspeed.initialize read the same file."""
    path = Path(shared_folder()) / "ds_config.json"
    if dist.get_rank() == 0:
        path.write_text(json.dumps(config))
    dist.barrier()
    return build(llama, str(path), zero_init=True)


def checkpointed(config, **options):
    """Blocks that run through deepspeed.checkpointing."""
    if get_accelerator().Stream is None:  # DeepSpeed 0.18 makes one, which it does not use, on a CPU too
        type(get_accelerator()).Stream = lambda self, device: None
    deepspeed.checkpointing.configure(None, deepspeed_config=config, **options)
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            module._gradient_checkpointing_func = deepspeed.checkpointing.checkpoint
    return model


def muon(parameters):
    """Made here and not by a ds_config: there its Adam is one that has to be compiled."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    by_kind = {True: [], False: []}
    for param in parameters:
        param.use_muon = param.dim() > 1
        by_kind[param.use_muon].append(param)
    own = {True: {"momentum": 0.95}, False: {"betas": (0.9, 0.95), "eps": 1e-8}}
    groups = [{"params": by_kind[k], "use_muon": k, "lr": 1e-3, "weight_decay": 0.0, **own[k]} for k in own]
    return MuonWithAuxAdam(groups)


# -- what is done with an engine -----------------------------------------------------------------------------------


def states_go_and_come(engine):
    """DeepSpeed moves states of its FusedAdam only, which has to be compiled: torch's stands in for it."""
    losses = trained(engine, 2)
    with mock.patch.object(deepspeed.ops.adam.fused_adam, "FusedAdam", type(engine.optimizer.optimizer)):
        engine.offload_states()
        assert engine.optimizer.offloaded_states >= {OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params}
        engine.reload_states()
    return losses + trained(engine, 2)


def read_and_written(engine):
    """Return what DeepSpeed's functions for a parameter's master weight, gradient and state return and change."""
    seen = [stepped(engine, tokens) for tokens in batches(1, dist.get_rank())]
    (tokens,) = batches(1, dist.get_rank(), seed=2)
    forward_backward(engine, tokens)
    param = engine.module.model.layers[1].mlp.up_proj.weight
    shape = param.ds_shape

    def look():
        seen.append(ds_utils.safe_get_full_fp32_param(param).clone())
        seen.append(ds_utils.safe_get_full_grad(param).clone())
        seen.append(ds_utils.safe_get_full_optimizer_state(param, "exp_avg").clone())
        for local in (ds_utils.safe_get_local_fp32_param(param), ds_utils.safe_get_local_grad(param)):
            seen.append(local.clone())
        seen.append(ds_utils.safe_get_local_optimizer_state(param, "exp_avg_sq").clone())

    look()
    values = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    ds_utils.safe_set_full_fp32_param(param, values)
    ds_utils.safe_set_full_optimizer_state(param, values / 100, "exp_avg")
    ds_utils.safe_set_full_grad(param, values / 10)
    look()
    own = torch.full_like(ds_utils.safe_get_local_fp32_param(param), 0.01)
    ds_utils.safe_set_local_fp32_param(param, own)
    ds_utils.safe_set_local_optimizer_state(param, own, "exp_avg_sq")
    ds_utils.safe_set_local_grad(param, own)
    look()
    engine.step()
    assert all(torch.equal(seen[n], values / d) for n, d in ((7, 1), (8, 10), (9, 100)))
    assert all(torch.equal(got, own) for got in (seen[16], seen[17], seen[18]))
    return seen + trained(engine, 1)


def gathered(engine):
    """GatheredParameters of one, several or a generator, switched off, for a module, and written by a rank."""
    seen = trained(engine, 1)
    model, weight = engine.module, engine.module.model.layers[0].self_attn.q_proj.weight
    norm = model.model.norm.weight
    for params in (weight, [weight, norm], (p for p in (weight, norm))):
        with deepspeed.zero.GatheredParameters(params):
            seen.append(weight.detach().clone())
    with deepspeed.zero.GatheredParameters(weight, enabled=False):
        seen.append(weight.numel())
    with deepspeed.zero.GatheredParameters([weight], fwd_module=model.model), torch.no_grad():
        seen.append(weight.sum())
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=1):
        if dist.get_rank() == 1:
            weight.data.mul_(1.5)
    with deepspeed.zero.GatheredParameters([weight, norm], modifier_rank=0), torch.no_grad():
        if dist.get_rank() == 0:
            norm.add_(0.25)
    return seen + trained(engine, 2)


def cpu_adam(parameters):
    return deepspeed.ops.adam.DeepSpeedCPUAdam(parameters, lr=1e-3)


def is_compiled(operation):
    """Whether DeepSpeed has compiled it, which takes minutes and a compiler."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(operation, False), f"{operation}.so").exists()


def by_curriculum(engine):
    """Rows that DeepSpeed's sampler draws, as short as its schedule says."""
    engine.data_efficiency_config()["data_sampling"]["curriculum_learning"]["data_cluster_path"] = shared_folder()
    rows = [row for tokens in batches(16, rank=0) for row in tokens]
    loader, seen, lengths = engine.deepspeed_io(rows, num_local_io_workers=0), [], []
    for _, tokens in zip(range(4), loader):
        lengths.append(loader.data_sampler.current_difficulties["length"])
        seen += [stepped(engine, tokens[:, : lengths[-1]]), tokens]
    assert lengths == sorted(lengths) and len(set(lengths)) > 2, lengths
    return seen


def uncompiled(engine):
    """Torch takes minutes to compile Muon's iteration."""
    with torch.compiler.set_stance("force_eager"):
        return trained(engine)


def of_tensor_parallel_ranks(engine):
    """Both ranks of a tensor-parallel group have the same data, and each keeps half of a checkpoint's activation."""
    assert engine.autotp_size() == 2
    deepspeed.checkpointing.configure(ds_utils.groups, partition_activations=True)
    losses = trained(engine, data_rank=dist.get_rank() // 2)
    assert deepspeed.checkpointing.mp_size == 2
    return losses


# -- cases ---------------------------------------------------------------------------------------------------------


ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class Case:
    """`config` is added to the ds_config, `fields` to the section with `zeropp`."""

    config: dict = field(default_factory=dict)
    model: Callable = lambda config: llama()
    run: Callable = trained
    optimizer: Callable = ADAMW
    fields: dict = field(default_factory=dict)


def zero(**keys):
    return {"zero_optimization": keys}


ALL_REDUCED = zero(reduce_scatter=False)
CHECKPOINTED = {"partition_activations": True, "cpu_checkpointing": True}
LENGTHS = {
    "difficulty_type": "value",
    "clustering_type": "single_cluster",
    "min_difficulty": 8,
    "max_difficulty": 32,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8},
}
CURRICULUM = {"enabled": True, "data_cluster_path": "", "curriculum_metrics": {"length": LENGTHS}}
SAMPLING = {"enabled": True, "num_workers": 0, "curriculum_learning": CURRICULUM}
CASES = {
    "fp16": Case({"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "torch_autocast": Case({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    "torch_autocast, no dtype": Case({"torch_autocast": {"enabled": True}}),
    "communication_data_type": Case({"bf16": {"enabled": True}, "communication_data_type": "fp32"}),
    "grad_accum_dtype": Case({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}),
    "prescale_gradients": Case({"prescale_gradients": True, **ALL_REDUCED}, fields=EXACT_GRADIENTS),
    "gradient_predivide_factor": Case({"gradient_predivide_factor": 2.0, **ALL_REDUCED}, fields=EXACT_GRADIENTS),
    "offload_optimizer": Case(zero(offload_optimizer=CPU)),
    "DeepSpeedCPUAdam": Case(zero(offload_optimizer=CPU), optimizer=cpu_adam),
    "offload_param": Case(zero(offload_param=CPU)),
    "both offloads, bf16": Case({"bf16": {"enabled": True}, **zero(offload_optimizer=CPU, offload_param=CPU)}),
    "zero.Init": Case(model=init_with()),
    "zero.Init, remote_device": Case(zero(offload_param=CPU), model=init_with(remote_device="cpu")),
    "zero.Init, nested": Case(model=lambda config: build(lambda: Nested(config), config, zero_init=True)),
    "zero.Init, module": Case(model=init_of_a_model),
    "zero.Init, file": Case(model=init_from_a_file),
    "zero.Init, enabled": Case(model=init_with(enabled=False)),
    "deepspeed.checkpointing": Case(model=checkpointed),
    "cpu_checkpointing": Case({"activation_checkpointing": CHECKPOINTED}, model=checkpointed),
    "offload_states": Case(run=states_go_and_come),
    "safe_get, safe_set": Case(run=read_and_written),
    "GatheredParameters": Case(run=gathered),
    "data_efficiency": Case({"data_efficiency": {"enabled": True, "data_sampling": SAMPLING}}, run=by_curriculum),
    "random_ltd": Case(TOKEN_DROP, run=by_token_drop),
    "scheduler": Case({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-2}}}),
    "untested optimizer": Case(optimizer=functools.partial(torch.optim.Adagrad, lr=1e-2)),
    "Muon": Case(ALL_REDUCED, run=uncompiled, optimizer=muon, fields=EXACT_GRADIENTS),
    "AutoTP": Case({"tensor_parallel": {"autotp_size": 2}}, model=checkpointed, run=of_tensor_parallel_ranks),
}


def beside_stock(case):
    return compared(CASES[case])


def compared(case):
    """{"stock", "lossless" or "zeropp": the trace, whose one thing seen is what the case's `run` returns}."""
    importlib.import_module("torch._dynamo")  # zero.Init needs it imported before, see plugin.enable
    found = {}
    if "fp16" in case.config:
        allow_fp16_on_cpu()
    for name, chosen in {"stock": None, "lossless": MODULE, "zeropp": case.fields}.items():
        the_section = None if chosen is None else section(name, **chosen)

        def model(the_section=the_section):
            torch.manual_seed(0)
            return case.model(ds_config(the_section, **case.config))

        spec = Spec(the_section, config=case.config, model=model, optimizer=case.optimizer)
        found[name] = run(spec, [see(case.run)], ("weights", "masters"))
        deepspeed.checkpointing.reset()
    return found


# -- offload with copies in each node ------------------------------------------------------------------------------


def offloaded_with_copies():
    """{offload: (losses, norms of gradients, bytes between nodes of a second forward)} of hpZ, two ranks a node."""
    keys = {"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}
    kinds = {"none": {}, "optimizer": {"offload_optimizer": CPU}, "param": {"offload_param": CPU}}
    kinds["both"] = {**kinds["optimizer"], **kinds["param"]}
    without_recipe = {key: value for key, value in section().items() if key != "recipe"}
    norm, found = see(lambda engine: float(engine.get_global_grad_norm())), {}
    for name, offload in kinds.items():
        spec = Spec(without_recipe, config={**zero(**keys, **offload), "gradient_accumulation_steps": 2})
        trace = run(spec, [step, step, norm] * 3, ("bytes",))
        found[name] = trace.losses, trace.seen, trace.bytes["weights_backward"]["inter"]
    return found


def gradient_bytes():
    """{keys: bytes that a rank sends for gradients in a step}; and the number of parameters."""
    found, numel = {}, see(lambda engine: sum(p.ds_numel for p in engine.module.parameters()))
    for name, keys in {"reduce-scatter": {}, "all-reduce": ALL_REDUCED, "in fp32": ALL_REDUCED}.items():
        more = {"communication_data_type": "fp32"} if name == "in fp32" else {}
        trace = run(Spec(section("lossless", **MODULE), "bf16", {**keys, **more}), [step, step, numel], ("bytes",))
        found[name] = sum(trace.bytes["gradients"].values())
    return found, *trace.seen


# -- collectives that are late -------------------------------------------------------------------------------------


class Late:
    """A collective that takes place when it is waited for, and not before."""

    def __init__(self, call):
        self.wait = functools.cache(lambda timeout=None: call())

    def is_completed(self):
        return False


def late(collective):
    def call(output, *args, async_op=False, **kwargs):
        if not async_op:
            return collective(output, *args, **kwargs)
        output.zero_()
        return Late(lambda: collective(output, *args, **kwargs))

    return call


def wrong_when_late(engine):
    """Names of weights that are not what they are otherwise, when collectives are as late as can be."""
    expected, params = full_weights(engine.module), list(engine.module.parameters())
    with contextlib.ExitStack() as patches:
        for module, collective in ((deepspeed.comm, "all_gather_into_tensor"), (all_gather, "_all_gather_single")):
            patches.enter_context(mock.patch.object(module, collective, late(getattr(module, collective))))
        with deepspeed.zero.GatheredParameters(params):
            return [n for n, p in engine.module.named_parameters() if not torch.equal(p.detach(), expected[n])]


def gathered_late():
    """{who gathers: the names}."""
    sections = {"stock": None, "lossless": section("lossless", **MODULE), "zeropp": section("zeropp")}
    return {name: run(Spec(chosen), [step, see(wrong_when_late)]).seen[0] for name, chosen in sections.items()}


# -- what is refused -----------------------------------------------------------------------------------------------


class WithExperts(nn.Module):
    """DeepSpeed's own mixture of experts."""

    def __init__(self):
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.moe = MoE(16, nn.Linear(16, 16), num_experts=2, ep_size=1)


def pipeline():
    return deepspeed.pipe.PipelineModule([nn.Linear(8, 8)] * 2, num_stages=2, loss_fn=nn.MSELoss())


def of_meta_tensors():
    with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
        return llama()


def refusals():
    """{what was tried: (the error's type, its message)} of what DeepSpeed, torch or the plugin refuses."""
    the_section = section("zeropp")

    def of(model=llama, optimizer="adamw", **config):
        return Spec(the_section, config=config, model=model, optimizer=optimizer).engine

    def without_sync():
        with of()().no_sync():
            pass

    tried = {
        "pipeline, stage 1": of(pipeline, **zero(stage=1)),
        "pipeline, stage 3": of(pipeline),
        "MoE": of(WithExperts),
        "init_inference": lambda: deepspeed.init_inference(llama(), config={"zeropp_fp8": the_section}),
        "no_sync": without_sync,
        "meta": of(of_meta_tensors),
        "untested optimizer": of(optimizer="sgd", zero_allow_untested_optimizer=False),
        "Muon": of(optimizer=None, **ALL_REDUCED),
        "pipeline, stock": lambda: type(Spec(config=zero(stage=1), model=pipeline, plugin=True).engine()).__name__,
    }
    found = {}
    for name, attempt in tried.items():
        try:
            found[name] = ("none", attempt())
        except Exception as error:
            found[name] = (type(error).__name__, str(error))
    return found
