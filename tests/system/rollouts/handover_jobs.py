"""Jobs about handing weights over to an engine that generates, that run on ranks."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace

import torch
import torch.distributed as dist
from frozen_jobs import frozen
from generation_jobs import several_adapters
from merged_jobs import all_kinds_of_adapters
from models import full_weights, llama, section, train
from ranks import printed
from recipes import WAYS
from running import Spec, loss_of

import zeropp_fp8
from zeropp_fp8 import sharded
from zeropp_fp8.handover import WeightSource

NF4 = frozen("nf4", block_size=16, double_quantize=True)


def engine_of(recipe="lossless", adapters="none", dtype="fp32", steps=1, sizes=None, **fields):
    model = functools.partial(llama, layers=3, **(sizes or {}))
    engine = Spec(
        section(recipe, **fields), dtype, model=model, lr=1e-2, adapted=all_kinds_of_adapters(adapters)
    ).engine()
    train(engine, steps)
    return engine


def over(model, **options):
    """A lossless engine over a model that is there."""
    return Spec(section("lossless"), lr=1e-2, **options).engine(model)


def copied(source):
    return {name: tensor.detach().clone() for name, tensor in source}


def declared(source):
    return [(name, dtype, tuple(shape)) for name, dtype, shape in source.metadata()]


def shown(tensors):
    return [(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]


def there(engine):
    return sum(p.ds_numel for p in engine.module.parameters() if p.ds_status.name == "AVAILABLE")


def whole_models(cases, stateful):
    """{case: equal to GatheredParameters bit for bit; declared as it came; most elements there; losses}."""
    found = {}
    for case, (way, tie, dtype) in cases.items():
        recipe, fields = WAYS[way]
        engine = engine_of(recipe, dtype=dtype, sizes={"tie": tie}, **fields)
        weights, source = full_weights(engine.module), WeightSource(engine, weights="merged")
        most, got = 0, {}
        for name, tensor in source:
            got[name] = tensor.clone()
            most = max(most, there(engine))
        equal = got.keys() == weights.keys() and all(torch.equal(got[n].float(), w) for n, w in weights.items())
        block = sum(p.ds_numel for p in engine.module.model.layers[0].parameters())
        largest = max(block, engine.module.model.embed_tokens.weight.ds_numel)
        agrees = declared(source) == shown(got) and not there(engine)
        losses = [train(engine, 2, seed=2)]
        engine.destroy()
        if case in stateful:
            engine = engine_of(recipe, dtype=dtype, sizes={"tie": tie}, **fields)
            losses.append(train(engine, 2, seed=2))
            engine.destroy()
        found[case] = {
            "equal": equal,
            "declared": agrees,
            "most": most / largest,
            "whole": sum(w.numel() for w in weights.values()) / largest,
            "losses": losses,
            "dtypes": {str(t.dtype) for t in got.values()},
        }
    return found


def merged_models(cases):
    """{case: largest difference to merge_and_unload, ...} with adapters of all kinds over NF4."""
    found = {}
    for kind, dtype, already, tie in cases:
        engine = engine_of(adapters=kind, dtype=dtype, sizes={"tie": tie}, frozen=NF4)
        weights = full_weights(engine.module)
        if already:
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
                engine.module.merge_adapter()
        source = WeightSource(engine, weights="merged")
        got = copied(source)
        ordinary = all_kinds_of_adapters(kind)(llama(tie=tie, layers=3)).float()
        ordinary.load_state_dict(weights, strict=False)
        expected = dict(ordinary.merge_and_unload().named_parameters())
        base = [] if already or kind == "modules to save" else base_of(engine, weights)
        found[kind, dtype, already, tie] = {
            "names": set(got) == set(expected),
            "off": [n for n, w in expected.items() if not torch.equal(got[n], w.to(got[n].dtype))],
            "dtypes": {str(t.dtype) for t in got.values()},
            "declared": declared(source) == shown(got),
            "base off": base,
        }
        engine.destroy()
    return found


def merged_into_float8():
    """Whether FP8 codes of merged weights are within half a step of fp32's; and the dtypes of what is there besides."""
    engine = engine_of(adapters="lora", dtype="bf16", frozen=NF4)
    ordinary = all_kinds_of_adapters("lora")(llama(layers=3)).float()
    ordinary.load_state_dict(full_weights(engine.module), strict=False)
    expected = dict(ordinary.merge_and_unload().named_parameters())
    source = WeightSource(engine, "merged", format="fp8")
    got = copied(source)
    codes = [name for name, tensor in got.items() if tensor.dtype == torch.float8_e4m3fn]
    close = {name: written_out(got, name, expected[name].detach()) for name in codes}
    return close, declared(source) == shown(got), source.quantization_config()["ignore"]


def base_of(engine, weights):
    """Names of the base model's weights that are not what is there without adapters."""
    got = copied(WeightSource(engine, weights="base"))
    plain = {n.removeprefix("base_model.model.").replace(".base_layer", ""): w for n, w in weights.items()}
    return [n for n, t in got.items() if not torch.equal(t.float(), plain[n])] + [
        n for n in plain if "lora" in n and n in got
    ]


def adapters_alone(kinds, folder):
    """{kind: (names and values as PEFT saves them and as it loads them, declared as they came, names)}."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import save_file

    found = {}
    for kind in kinds:
        engine = engine_of("zeropp", adapters=kind, frozen=NF4)
        source = WeightSource(engine.module, weights="adapters")
        got = copied(source)
        saved = get_peft_model_state_dict(engine.module, full_weights(engine.module), save_embedding_layers=False)
        equal = got.keys() == saved.keys() and all(torch.equal(got[n].float(), saved[n]) for n in saved)
        if dist.get_rank() == 0:  # as docs/handover.md does it
            save_file(got, f"{folder}/adapter_model.safetensors")
            engine.module.peft_config["default"].save_pretrained(folder)
            loaded = get_peft_model_state_dict(PeftModel.from_pretrained(llama(layers=3), folder))
            equal = equal and loaded.keys() == got.keys() and all(torch.equal(loaded[n], got[n]) for n in got)
        found[kind] = equal, declared(source) == shown(got), list(got)
        engine.destroy()
    return found


def taking_part():
    """(merges to declare, merges to hand over, names, all names) where rank 0 alone takes the tensors."""
    from unittest import mock

    from peft.tuners.lora.layer import Linear

    source, merges = WeightSource(engine_of(adapters="lora", frozen=NF4)), []
    known = Linear.merge
    with mock.patch.object(Linear, "merge", lambda self, *args, **kw: merges.append(1) or known(self, *args, **kw)):
        names, to_declare = [meta.name for meta in source.metadata()], len(merges)
        got = list(copied(source)) if dist.get_rank() == 0 else [name for name, _ in source.take_part()]
    return to_declare, len(merges), got, names


def float8_weights(ways):
    """{way: what FP8 hand-overs gave, beside the operands of a forward pass and a written-out cast}."""
    found = {}
    for way, (recipe, fields) in ways.items():
        engine = engine_of(recipe, dtype="bf16", sizes={"hidden": 128, "intermediate": 256}, **fields)
        operands, layers = {}, {f"{n}.weight": m for n, m in engine.module.named_modules() if n.endswith("_proj")}

        def keep(name, operands=operands):
            def hook(module, *_):
                operand = sharded.known(dict.__getitem__(module._parameters, "weight")).operand
                if operand is not None:
                    operands[name] = operand.codes.clone(), operand.scale.clone()

            return hook

        handles = [layer.register_forward_hook(keep(name)) for name, layer in layers.items()]
        train(engine, 1, seed=3)
        handles = [handle.remove() for handle in handles]
        engine_operands = dict(operands)
        weights = full_weights(engine.module)
        operands.clear()
        source = WeightSource(engine, "merged", format="fp8")
        got = copied(source)
        agrees = declared(source) == shown(got) and not there(engine)
        handles = [layer.register_forward_hook(keep(name)) for name, layer in layers.items()]
        with torch.no_grad():
            tokens = torch.arange(64).view(2, 32)
            engine(input_ids=tokens, labels=tokens)
        found[way] = {
            "declared": agrees,
            "as multiplied": [same_codes(got, n, *operand) for n, operand in operands.items()],
            "as written out": {n: written_out(got, n, weights[n]) for n in layers if n + "_scale" in got},
            "others": all(
                torch.equal(t.float(), weights[n])
                for n, t in got.items()
                if n in weights and t.dtype != torch.float8_e4m3fn
            ),
            "names": sorted(n for n in got if n.endswith("_scale")) == sorted(f"{n}_scale" for n in layers),
            "config": source.quantization_config(),
            "dtypes": {str(t.dtype) for n, t in got.items()},
            "had operands": len(engine_operands),
            "loss": train(engine, 1, seed=4),
        }
        engine.destroy()
    return found


def under_inference_mode(ways):
    """{way: losses of steps after hand-overs of FP8 codes, without torch.inference_mode() and under it}."""
    found = {}
    for way in ways:
        recipe, fields = WAYS[way]
        for under in (False, True):
            engine, losses = engine_of(recipe, dtype="bf16", steps=0, **fields), []
            source = WeightSource(engine, format="fp8")
            for _ in range(2):
                with torch.inference_mode(under):
                    copied(source)
                losses += train(engine, 1)
            found.setdefault(way, []).append(losses)
            engine.destroy()
    return found


def same_codes(got, name, codes, scale):
    rows, columns = got[name].shape
    wanted = scale.expand(rows, 1) if scale.dim() == 1 else scale
    same = torch.equal(got[name].view(torch.uint8), codes[:, :columns].view(torch.uint8))
    return same and torch.equal(got[f"{name}_scale"], wanted)


def written_out(got, name, weight):
    """How far code * scale is from a weight, in steps of FP8 of its scale; and whether the scale is amax / 448."""
    codes, scale = got[name].float(), got[f"{name}_scale"]
    if scale.shape == (len(codes), 1):
        full, amax = scale.expand_as(codes), weight.abs().amax(dim=1, keepdim=True)
        amax = amax if not torch.equal(scale, scale[:1].expand_as(scale)) else weight.abs().max().expand_as(scale)
    else:
        full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: codes.shape[0], : codes.shape[1]]
        amax = torch.stack([torch.stack([t.abs().max() for t in r.split(128, 1)]) for r in weight.split(128, 0)])
    step = torch.maximum(weight.abs() / 16, full * 2**-10)  # half of the last of 3 bits; of the least subnormal
    return ((codes * full - weight).abs() <= step * 1.0001).all().item(), torch.allclose(scale, amax / 448, rtol=1e-6)


# -- what fails ------------------------------------------------------------------------------------------------------


def attempt(action):
    try:
        action()
        return "done"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def failures():
    """Return what each rank says where one fails, and that the engine trains on."""
    from unittest import mock

    from peft.tuners.lora.layer import Linear

    engine, said = engine_of(adapters="lora"), {}
    source, first, calls = WeightSource(engine, "merged"), dist.get_rank() == 0, []

    def merge(self, *args, **kwargs):
        calls.append(1)
        if not first and len(calls) > 3:
            raise MemoryError("no room to merge")
        return known(self, *args, **kwargs)

    known = Linear.merge
    with mock.patch.object(Linear, "merge", merge):
        got = []
        said["merging"] = attempt(lambda: got.extend(name for name, _ in source))
    said["until then"] = len(got)

    def stop():
        with contextlib.closing(iter(source)) as weights:
            for number, _ in enumerate(weights):
                if first and number == 4:
                    raise OSError("the engine is gone")

    said["stopped"] = attempt(stop)
    said["then"] = attempt(lambda: copied(source))
    with zeropp_fp8.generation(engine, weights="values"):
        said["generating"] = attempt(lambda: copied(source))
    said["loss"] = train(engine, 1)
    engine.module.merge_adapter = None
    for layer in engine.module.modules():
        if hasattr(layer, "merged_adapters"):
            layer.merged_adapters = ["default"]
    said["base"] = attempt(lambda: WeightSource(engine, weights="base").metadata())
    return said


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


# -- TRL -------------------------------------------------------------------------------------------------------------


def through_trl():
    """Return what TRL's own `sync_weights` sends to a server, with the plugin's iteration and with TRL's.

    {way: (weights, most elements there, losses)}, whether TRL's method is replaced, and still is after `disable()`.
    """
    from trl.generation import vllm_generation
    from trl.generation.vllm_generation import VLLMGeneration

    class Server:
        def update_named_params(self, metadata, weights):
            self.held, self.most = {}, 0
            for (name, dtype, shape), (came, tensor) in zip(metadata, weights, strict=True):
                assert (name, dtype, shape) == (came, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
                self.held[name] = tensor.clone()
                self.most = max(self.most, there(engine))

        def reset_prefix_cache(self):
            self.held["reset"] = torch.ones(1)

    found = {}
    for way in ("detect", "stock"):
        engine = engine_of(adapters="lora", dtype="bf16", trl_generation=way)
        trl = VLLMGeneration.__new__(VLLMGeneration)
        trl.model, trl.mode, trl.enable_sleep_mode, trl._weight_metadata = engine.module, "server", False, None
        accelerator = SimpleNamespace(
            is_main_process=dist.get_rank() == 0,
            state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3)),
        )
        trl.accelerator, trl._dist, trl.vllm_client = (
            accelerator,
            vllm_generation.DistributedBackend(accelerator),
            Server(),
        )
        trl.sync_weights()
        found[way] = getattr(trl.vllm_client, "held", None), getattr(trl.vllm_client, "most", None), train(engine, 1)
        engine.destroy()
    replaced = hasattr(VLLMGeneration._iter_named_params, "zeropp_fp8")
    zeropp_fp8.disable()
    return found, replaced, hasattr(VLLMGeneration._iter_named_params, "zeropp_fp8")


def measured(runs, args):
    """Rows of the benchmark."""
    from benchmarks.handover import measure

    return [measure(run, args, torch.device("cpu")) for run in runs]


def refusals():
    """Return what is said of sources that cannot be had, and by whom TRL is left as it is."""
    from unittest import mock

    import peft
    from trl.generation.vllm_generation import VLLMGeneration

    said = {}
    with mock.patch.object(VLLMGeneration, "sync_weights", lambda self: None):
        plain = engine_of()
        said["another TRL"] = hasattr(VLLMGeneration._iter_named_params, "zeropp_fp8"), printed()
    said["weights"] = attempt(lambda: WeightSource(plain, weights="all"))
    said["format"] = attempt(lambda: WeightSource(plain, format="fp4"))
    said["codes of adapters"] = attempt(lambda: WeightSource(plain, weights="adapters", format="fp8"))
    said["no codes"] = attempt(lambda: WeightSource(plain).quantization_config())
    said["no adapters"] = attempt(lambda: WeightSource(plain, weights="adapters").metadata())
    said["no engine"] = attempt(lambda: WeightSource(llama()))
    tokens = torch.arange(64).view(2, 32)
    loss_of(plain, tokens)
    plain.optimizer.gatherer.units[-1].active_modules.add(1)
    said["in a pass"] = attempt(lambda: copied(WeightSource(plain)))
    plain.optimizer.gatherer.units[-1].active_modules.clear()
    plain.destroy()
    prompt = engine_of(adapters="prompt", steps=0)
    said["prompt"] = attempt(lambda: WeightSource(prompt))
    prompt.destroy()
    lora = engine_of(adapters="lora", steps=0)
    with mock.patch.object(peft, "get_peft_model_state_dict", lambda *_, **__: {"made": torch.ones(1)}):
        said["made"] = attempt(lambda: WeightSource(lora, weights="adapters").metadata())
    several = over(several_adapters(llama()))
    said["several"] = attempt(lambda: WeightSource(several, weights="adapters").metadata())
    several.module.base_model.set_adapter("second")  # PeftModel.active_adapter stays as it was
    said["ranks of the second"] = str({min(meta.shape) for meta in WeightSource(several, "adapters").metadata()})
    return said
