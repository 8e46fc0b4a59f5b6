"""Jobs about what a source hands over where it chooses by itself, to a process that stands in for an engine."""

from __future__ import annotations

import deepspeed
import torch
import torch.distributed as dist
from handover_jobs import attempt, bits, copied, init_info, stand_in
from merged_jobs import all_kinds_of_adapters
from models import ds_config, full_weights, llama, make_engine, section, train
from running import switch

from zeropp_fp8.handover import Transfer, WeightSource

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


def expected(engine, kind, tie, apart, merged):
    """Return what an engine has to hold, of weights gathered by DeepSpeed, by PEFT on an ordinary model."""
    from peft import get_peft_model_state_dict

    weights, module = full_weights(engine.module), engine.module
    if kind == "none" or merged:
        return plain(weights)
    if apart:
        saved = get_peft_model_state_dict(module, weights, module.active_adapter, save_embedding_layers=False)
        return plain(weights) | saved
    ordinary = model_of(kind, tie).float()
    ordinary.load_state_dict(weights, strict=False)
    ordinary.set_adapter(module.active_adapter)
    return dict(ordinary.merge_and_unload().named_parameters())


class Story:
    """Hand-overs of one engine, each after something has happened.

    Attributes:
        found: {what has happened: (bytes that came, whether the engine holds what it has to)}.
    """

    def __init__(self, engine, folder, limit, kind, tie, apart, options):
        self.engine, self.folder, self.limit = engine, folder, limit
        self.source = WeightSource(engine, takes_adapters=apart, **options)
        self.client, self.found, self.merged = None, {}, False
        self.how = {"kind": kind, "tie": tie, "apart": apart}
        self.codes = "format" in options
        self.start_engine()

    def end_engine(self):
        if self.client is not None:
            self.client.close()

    def start_engine(self):
        from stand_in import Trainer

        self.end_engine()
        if dist.get_rank() == 0:
            self.client = Trainer(f"{self.folder}/socket", b"key")
        self.transfer = Transfer.trainer_init(init_info(self.limit), client=self.client, source=self.source)

    def tell(self, happened, action=lambda: None):
        action()
        before = self.transfer.sent_bytes
        calls = 0 if self.client is None else len(self.client.calls)
        self.transfer.send_weights()
        sent = self.transfer.sent_bytes - before
        if self.codes:
            wanted = copied(WeightSource(self.engine, takes_adapters=True, format="fp8"))
        else:
            wanted = expected(self.engine, merged=self.merged, **self.how)
            wanted = {name: tensor.detach().to(torch.bfloat16) for name, tensor in wanted.items()}
        if self.client is not None:
            there = torch.load(f"{self.folder}/held.pt")
            came = sum(there["sizes"]) if len(self.client.calls) > calls else 0
            same = there["held"].keys() == wanted.keys()
            same = same and all(torch.equal(bits(there["held"][n]), bits(t)) for n, t in wanted.items())
            self.found[happened] = came, same and came == sent

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

    def forget_here(self):
        if dist.get_rank() == 0:
            self.source.forget()


def chosen(folder, limit, cases):
    """{case: Story.found}, and what is said where adapters that go apart are merged or scaled.

    Where `kept` elements are not exceeded parameters stay gathered, and there are biases that do.
    """
    switch(True)
    told, said = {}, {}
    with stand_in(folder) as (client, _):
        if client is not None:
            client.close()  # each case starts the engine anew
        for case, (*how, kept) in cases.items():
            zero = {"stage3_param_persistence_threshold": kept}
            config = ds_config(section("lossless"), "bf16", zero_optimization=zero)
            engine = make_engine(model_of(*how[:2], bias=kept > 0), config, lr=1e-2)
            train(engine, 1)
            engine.save_checkpoint(f"{folder}/{case}")
            story = Story(engine, folder, limit, *how)
            told[case] = story.found
            said |= happens(story, f"{folder}/{case}")
            story.end_engine()
            engine.destroy()
    return told, said


def happens(story, checkpoint):
    """Return what is said of adapters that go apart when they are merged or scaled."""
    engine, kind, apart, said = story.engine, story.how["kind"], story.how["apart"], {}
    story.tell("first")
    story.tell("nothing")
    story.tell("step", lambda: train(engine, 1))
    if story.codes:
        return said
    story.tell("written", story.write)
    story.tell("loaded", lambda: engine.load_checkpoint(checkpoint))
    if kind != "none":
        if apart:
            story.in_whole("merge_adapter")
            said["merged"] = attempt(story.transfer.send_weights)
        else:
            story.tell("merged", lambda: story.in_whole("merge_adapter"))
        story.tell("unmerged", lambda: story.in_whole("unmerge_adapter"))
        story.tell("other", lambda: engine.module.set_adapter("other"))
        story.tell("back", lambda: engine.module.set_adapter("default"))
    story.tell("asked for", story.forget_here)
    transfer = story.transfer
    story.tell("restarted", story.start_engine)
    said["of the engine before"] = attempt(transfer.send_weights)
    if apart:
        layer = next(m for m in engine.module.modules() if hasattr(m, "set_scale"))
        layer.set_scale("default", 2.0)
        said["scaled"] = attempt(story.transfer.send_weights)
        layer.set_scale("default", 1.0)
        said["again"] = attempt(story.transfer.send_weights)
    train(engine, 1)
    return said
