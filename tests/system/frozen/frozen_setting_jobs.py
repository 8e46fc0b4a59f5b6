"""Jobs about a frozen store in models and settings of all kinds, against weights that were rounded beforehand."""

from __future__ import annotations

import torch
from frozen_jobs import TARGETS, load_into
from frozen_models import codes, config_of, rounded, same, with_adapters
from models import KEPT, build, full_fp32_weights, llama, make_engine, train
from running import switch


class Body(torch.nn.Module):
    """Layers whose rows and parts do not fill blocks, with biases."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(37, 53), torch.nn.Linear(53, 5), torch.nn.Linear(5, 3)])

    def forward(self, hidden):
        for layer in self.layers:
            hidden = torch.nn.functional.silu(layer(hidden))
        return hidden


class Odd(torch.nn.Module):
    """A model that initializes what is stored by then: empty tensors under zero.Init, which stock does not mind."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.embedding, self.body, self.head = torch.nn.Embedding(256, 37), Body(), torch.nn.Linear(3, 4)
        torch.nn.init.normal_(self.body.layers[0].weight)
        self.apply(lambda module: torch.nn.init.normal_(module.weight) if hasattr(module, "weight") else None)
        for param in self.body.parameters():
            param.requires_grad_(False)

    def forward(self, input_ids, labels):
        logits = self.head(self.body(self.embedding(input_ids)))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten() % 4)
        return type("Output", (), {"loss": loss})()


def gpt2(tie=True):
    """A GPT-2, whose linear layers are Conv1D with biases, and whose head is its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, use_cache=False, tie_word_embeddings=tie))


MAKERS = {"llama": llama, "odd": Odd, "gpt2": gpt2, "tied": lambda: llama(tie=True, attention_bias=True)}


def trained(model, config, fields=None, round_names=(), zero_init=False, checkpointing=None):
    """Train adapters of a model, `round_names` of whose weights are rounded as `fields` say beforehand.

    Returns what must be equal: losses, trained weights. And which weights are stored, and whether no code changed.
    """
    made = build(MAKERS[model], config, zero_init)
    made = load_into(made, MAKERS[model]().state_dict())
    for name in round_names:
        weight = made.get_parameter(name)
        weight.data = rounded(weight.data, fields)
    if model != "odd":
        targets = ["c_attn", "c_fc"] if model == "gpt2" else TARGETS
        made = with_adapters(made, target_modules=targets, fan_in_fan_out=model == "gpt2")
    if checkpointing is not None:
        made.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        made.enable_input_require_grads()
    engine = make_engine(made, config, lr=1e-2)
    before = codes(made)
    # The second step goes by the order of modules that the first recorded, and its losses show the first's update.
    results = train(engine, 2), full_fp32_weights(made)
    found = results, sorted(before), same(before, codes(made))
    engine.destroy()
    return found


def all_against_rounded(cases):
    """Of each case, whether training over stored weights gives what weights give that were rounded beforehand.

    Bit for bit. What rounded weights give depends on the unit of gathers, which is that of reductions too, and on no
    other setting, nor on checkpointing: cases share it.
    """
    switch(True)
    logs, references = {}, {}
    for name, case in cases.items():
        case = {"model": "llama", "zero_init": False, "checkpointing": None, "overrides": None, **case}
        model, fields, overrides = case.pop("model"), case.pop("fields"), case.pop("overrides")
        setting = {key: case.pop(key) for key in ("zero_init", "checkpointing")}
        config = config_of(fields, ranks_per_node=1, overrides=overrides, **case)
        (losses, weights), stored, unchanged = trained(model, config, **setting)
        numbers = {key: value for key, value in fields.items() if key not in ("modules", "skip_modules")}
        granularity = case.get("gather_granularity", "block")
        key = model, granularity, str(numbers), tuple(stored)
        if key not in references:
            kept = {"zero_optimization": KEPT}
            plain_config = config_of(
                {"format": "none"}, ranks_per_node=1, overrides=kept, gather_granularity=granularity
            )
            references[key] = trained(model, plain_config, fields, stored)[0]
        wanted, wanted_weights = references[key]
        logs[name] = {
            "equal": losses == wanted and same(weights, wanted_weights) and unchanged,
            "losses": (losses, wanted),
            "stored": stored,
        }
    return logs
