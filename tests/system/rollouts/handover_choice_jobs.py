"""Jobs about elements that have changed, after all that can happen to an engine and its adapters."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from handover_jobs import Receiver, bits, copied
from merged_jobs import all_kinds_of_adapters
from models import ds_config, full_weights, llama, make_engine, section, train
from running import switch

from zeropp_fp8.handover import WeightSource

VOCABULARY = 264  # of resized embeddings; 256 before


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
