"""Jobs about elements that have changed: what comes of them, what fails, and all that can happen to an engine."""

from __future__ import annotations

import contextlib

import deepspeed
import torch
import torch.distributed as dist
from handover_jobs import attempt, bits, copied, engine_of, over
from merged_jobs import all_kinds_of_adapters
from models import ds_config, full_weights, llama, make_engine, section, train
from running import switch

import zeropp_fp8
from zeropp_fp8.handover import Changes, WeightSource

VOCABULARY = 264  # of resized embeddings; 256 before


class Receiver:
    """An engine's copy of the weights, kept up to date by patches; on rank 0.

    Attributes:
        held: the weights; sent: the elements that came the last time.
    """

    def __init__(self, source):
        self.source, self.changes, self.held = source, Changes(source), {}

    def update(self):
        """Whether what came is exactly what differed; and whether every bit is now that of a whole hand-over."""
        before = {name: bits_of(tensor).clone() for name, tensor in self.held.items()}
        came = {}
        for patches in self.changes:
            for name, shape, indices, values in patches:
                assert indices.dtype == torch.int32 and name not in came
                came[name] = torch.zeros(shape, dtype=torch.bool).view(-1)
                came[name][indices.long()] = True
                held = self.held.setdefault(name, torch.zeros(shape, dtype=values.dtype))
                held.view(-1)[indices.long()] = values
        self.sent = sum(int(of.sum()) for of in came.values())
        whole = copied(self.source)
        if dist.get_rank():
            return not came, not self.held
        exactly, same = True, self.held.keys() == whole.keys()
        for name, tensor in whole.items():
            now, then = bits_of(tensor), before.get(name)
            differs = torch.ones(len(now), dtype=torch.bool) if then is None else now != then
            exactly = exactly and torch.equal(came.get(name, torch.zeros_like(differs)), differs)
            same = same and torch.equal(bits_of(self.held[name]), now)
        return exactly, same


def bits_of(tensor):
    """Flat, as integers."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.itemsize]).view(-1)


def what_has_changed(cases):
    """{case: what a Receiver says and got at first, at once, after a step, after a write, and after one rank forgot}.

    And the bytes that rank 1 has sent outside of steps for the third.
    """
    found = {}
    for case, (recipe, adapters, dtype, format, fields) in cases.items():
        engine = engine_of(recipe, adapters=adapters, dtype=dtype, sizes={"hidden": 128, "intermediate": 256}, **fields)
        receiver, rounds = Receiver(WeightSource(engine, format=format)), []

        def hand_over(receiver=receiver, rounds=rounds):
            said = receiver.update()
            rounds.append((said, receiver.sent, receiver.changes.version))

        hand_over()
        hand_over()
        train(engine, 1)
        hand_over()
        outside = [sum(zeropp_fp8.wire_report(engine)["outside_steps"].values())]
        for patches in receiver.changes:
            assert not patches
        outside.append(sum(zeropp_fp8.wire_report(engine)["outside_steps"].values()))
        norm = next(p for n, p in engine.module.named_parameters() if n.endswith("model.norm.weight"))
        with deepspeed.zero.GatheredParameters([norm], modifier_rank=0):
            norm.data.add_(1.0)
        hand_over()
        if dist.get_rank() == 1:
            receiver.changes.forget()
        receiver.held.clear()
        hand_over()
        found[case] = rounds, outside[1] - outside[0], norm.ds_numel
        engine.destroy()
    return found


def changes_that_fail():
    """Return what each rank says where comparing fails on one; then all goes."""
    from unittest import mock

    engine, said = engine_of("zeropp", dtype="bf16"), {}
    receiver = Receiver(WeightSource(engine))
    receiver.update()
    train(engine, 1)
    known, calls = Changes._compared, []

    def changed(self, part):
        calls.append(part.name)
        if dist.get_rank() == 1 and len(calls) > 5:
            raise MemoryError("no room to compare")
        return known(self, part)

    with mock.patch.object(Changes, "_compared", changed):
        said["failing"] = attempt(receiver.update)
    receiver.held.clear()
    said["then"] = receiver.update()

    def stop():
        with contextlib.closing(iter(receiver.changes)) as groups:
            for number, _ in enumerate(groups):
                if dist.get_rank() == 0 and number == 1:
                    raise OSError("the engine is gone")

    train(engine, 1)
    said["stopped"] = attempt(stop)
    receiver.held.clear()
    said["again"] = receiver.update()
    said["adapters"] = attempt(lambda: Changes(WeightSource(engine_of(adapters="lora"), weights="adapters")))
    with mock.patch("zeropp_fp8.zero.handover.changes._MOST", 1000):
        receiver.changes.forget()
        said["large"] = attempt(receiver.update)
    return said


class Normed(torch.nn.Module):
    """Two linear layers around a norm whose buffers every forward writes; with `tied`, the first is also a third."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = (
            torch.nn.Linear(128, 128, bias=False),
            torch.nn.BatchNorm1d(128, affine=False),
            torch.nn.Linear(128, 128, bias=False),
        )
        if tied:
            self.again = torch.nn.Linear(128, 128, bias=False)
            self.again.weight = self.first.weight

    def forward(self, x):
        return self.last(self.norm(self.first(x))).square().mean()


def kept_up_to_date():
    """{what has changed: what a Receiver says, whether anything came}, and what a source says without its engine."""
    from peft import LoraConfig

    found = {}

    def lacking(name, change, engine):
        receiver = Receiver(WeightSource(engine))
        receiver.update()
        change()
        found[name] = receiver.update(), bool(receiver.sent)
        return receiver.source

    engine = engine_of(adapters="lora")
    engine.module.add_adapter("other", LoraConfig(r=8, target_modules=["q_proj"], init_lora_weights=False))
    engine.destroy()
    engine = over(engine.module)
    lacking("adapter", lambda: engine.module.set_adapter("other"), engine)

    def twice():
        for layer in engine.module.modules():
            if hasattr(layer, "set_scale") and "other" in getattr(layer, "scaling", {}):
                layer.set_scale("other", 2.0)

    lacking("scale", twice, engine)
    engine.destroy()
    engine, later = engine_of(steps=0), []

    def taken_over():
        train(engine, 1)
        later.append(over(engine.module, optimizer=None))

    lacking("taken over", taken_over, engine)
    source = lacking("given back", lambda: (train(engine, 1), later[0].destroy()), engine)
    engine.destroy()
    found["said"] = attempt(lambda: copied(source))
    engine = over(Normed())
    lacking("buffers", lambda: engine(torch.randn(4, 128)), engine)
    engine.destroy()
    source = WeightSource(over(Normed(tied=True)), format="fp8")
    found["codes of tied"] = sorted(copied(source)), source.quantization_config()["ignore"]
    return found


# -- all that can happen ---------------------------------------------------------------------------------------------


def model_of(kind, tie, bias=False):
    """A Llama with resized embeddings, adapters of a kind, and for "lora" and "modules to save" another adapter."""
    from peft import LoraConfig

    model = llama(tie=tie, attention_bias=bias)
    model.resize_token_embeddings(VOCABULARY, mean_resizing=False)
    model.scale = torch.nn.Parameter(torch.ones(2))  # of a transformers model itself, as CLIP has one
    model = all_kinds_of_adapters(kind)(model)
    if kind != "none":
        model.add_adapter("other", LoraConfig(r=8, target_modules=["q_proj"], init_lora_weights=False))
        return model
    for name, param in model.named_parameters():
        param.requires_grad = not any(part in name for part in ("embed", "layers.0", "mlp", "scale"))
    return model


def plain(weights):
    """A PEFT model's weights without its adapters, by the names of the model inside."""
    names = {n: n.removeprefix("base_model.model.") for n in weights if "lora_" not in n and "modules_to_save" not in n}
    return {n.replace(".base_layer", "").replace(".original_module", ""): weights[key] for key, n in names.items()}


def expected(engine, kind, tie, bias, merged):
    """Return what an engine has to hold, of weights gathered by DeepSpeed, by PEFT on an ordinary model."""
    weights, module = full_weights(engine.module), engine.module
    if kind == "none" or merged:
        return plain(weights)
    ordinary = model_of(kind, tie, bias).float()
    ordinary.load_state_dict(weights, strict=False)
    ordinary.set_adapter(module.active_adapter)
    return dict(ordinary.merge_and_unload().named_parameters())


class Story:
    """Hand-overs of one engine, each after something has happened.

    Attributes:
        found: {what has happened: (whether the engine holds what it has to, and nothing else came; elements that came)}
    """

    def __init__(self, engine, kind, tie, options, bias):
        self.engine, self.found, self.merged = engine, {}, False
        self.receiver = Receiver(WeightSource(engine, **options))
        self.how, self.codes = {"kind": kind, "tie": tie, "bias": bias}, "format" in options

    def tell(self, happened, action=lambda: None):
        action()
        well = all(self.receiver.update())
        if self.codes:
            wanted = copied(WeightSource(self.engine, format="fp8"))
        else:
            wanted = expected(self.engine, merged=self.merged, **self.how)
            wanted = {name: tensor.detach().to(torch.bfloat16) for name, tensor in wanted.items()}
        if dist.get_rank() == 0:
            held = self.receiver.held
            well = well and held.keys() == wanted.keys()
            well = well and all(torch.equal(bits(held[name]), bits(tensor)) for name, tensor in wanted.items())
        self.found[happened] = well, self.receiver.sent

    # -- what happens ------------------------------------------------------------------------------------------------

    def write(self):
        model = self.engine.module
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        param = model.model.layers[1].mlp.up_proj.weight
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            param.data.mul_(2.0)

    def in_whole(self, method):
        with deepspeed.zero.GatheredParameters(list(self.engine.module.parameters()), modifier_rank=0):
            getattr(self.engine.module, method)()
        self.merged = method == "merge_adapter"


def chosen(folder, cases):
    """{case: Story.found}. Where `kept` elements are not exceeded parameters stay gathered, with biases that do."""
    switch(True)
    told = {}
    for case, (*how, kept) in cases.items():
        zero = {"stage3_param_persistence_threshold": kept}
        config = ds_config(section("lossless"), "bf16", zero_optimization=zero)
        engine = make_engine(model_of(*how[:2], bias=kept > 0), config, lr=1e-2)
        train(engine, 1)
        engine.save_checkpoint(f"{folder}/{case}")
        story = Story(engine, *how, bias=kept > 0)
        told[case] = story.found
        happens(story, f"{folder}/{case}")
        engine.destroy()
    return told


def happens(story, checkpoint):
    engine, kind = story.engine, story.how["kind"]
    story.tell("first")
    story.tell("nothing")
    story.tell("step", lambda: train(engine, 1))
    if story.codes:
        return
    story.tell("written", story.write)
    story.tell("loaded", lambda: engine.load_checkpoint(checkpoint))
    if kind != "none":
        story.tell("merged", lambda: story.in_whole("merge_adapter"))
        story.tell("unmerged", lambda: story.in_whole("unmerge_adapter"))
        story.tell("other", lambda: engine.module.set_adapter("other"))
        story.tell("back", lambda: engine.module.set_adapter("default"))
    if dist.get_rank() == 0:
        story.receiver.changes.forget()
    story.receiver.held.clear()
    story.tell("asked for")
    train(engine, 1)
