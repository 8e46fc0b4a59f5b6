"""Jobs with mixtures of experts beside stock DeepSpeed."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import torch.distributed as dist
import transformers
from models import batches, section
from running import Spec, differing, run, step
from torch import nn

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
KINDS = {
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True},
    "Qwen2Moe": {"num_key_value_heads": 2, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2, **ROUTED},
    "Qwen3Moe": {"num_key_value_heads": 2, "head_dim": 16, "output_router_logits": True, **ROUTED},
    "Qwen3Moe with a capacity": {"num_key_value_heads": 2, "head_dim": 16, "output_router_logits": True, **ROUTED},
    "GptOss": {"num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
}


def mixture(kind):
    torch.manual_seed(0)
    options = {"vocab_size": 256, "use_cache": False, "pad_token_id": None, **SIZES, **KINDS[kind]}
    name, _, limited = kind.partition(" with a ")
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**options))
    for layer in model.model.layers if limited else ():
        layer.mlp.gate.register_forward_hook(drop_what_is_above_the_capacity)
    return model


def drop_what_is_above_the_capacity(router, inputs, output, capacity=30):
    """Give no weight to an expert's choices after the first ones, of 64 tokens that choose two of four experts."""
    logits, weights, chosen = output
    places = nn.functional.one_hot(chosen.flatten(), router.num_experts).cumsum(0)
    place = places.gather(1, chosen.view(-1, 1)).view_as(chosen)
    assert (place > capacity).any(), "no choice is dropped"
    return logits, weights.masked_fill(place > capacity, 0.0), chosen


class Routed(nn.Module):
    """Experts in modules of their own, of which a rank calls those that its tokens want: some, or none at all."""

    def __init__(self, size, count):
        super().__init__()
        self.router = nn.Linear(size, count, bias=False)
        self.experts = nn.ModuleList(nn.Linear(size, size) for _ in range(count))

    def forward(self, x, wanted):
        weights = self.router(x).softmax(-1)
        for index in wanted:
            x = x + weights[..., index, None] * self.experts[index](x)
        return x


class Sparse(nn.Module):
    """A loss of (tokens, which experts of which block are called)."""

    def __init__(self, size=32, count=4):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, size)
        self.blocks = nn.ModuleList(Routed(size, count) for _ in range(3))
        self.head = nn.Linear(size, 256)

    def forward(self, tokens, wanted):
        x = self.embed(tokens)
        for block, of_block in zip(self.blocks, wanted):
            x = block(x, of_block)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def beside_stock(kind, dtype, accumulation):
    """{run: losses, "differing": how lossless differs from stock, block by block and module by module}."""
    config = {"gradient_accumulation_steps": accumulation, "gradient_clipping": 1.0}
    layers = (type(mixture(kind).model.layers[-1]),)
    data = list(batches(3 * accumulation, dist.get_rank()))
    specs = {
        "stock, leaf modules": Spec(leaves=layers),
        "lossless": Spec(section("lossless")),
        "stock": Spec(),
        "by module": Spec(section("lossless", gather_granularity="module")),
        "zeropp": Spec(section("zeropp")),
        "zeropp-4bit": Spec(section("zeropp-4bit")),
    }
    traces = {}
    for name, spec in specs.items():
        spec = replace(spec, dtype=dtype, config=config, model=functools.partial(mixture, kind))
        traces[name] = run(spec, [step] * len(data), ["masters"], data=data)
    pairs = ("stock, leaf modules", "lossless"), ("stock", "by module")
    found = {name: trace.losses for name, trace in traces.items()}
    return found | {"differing": [differing(traces[stock], traces[own]) for stock, own in pairs]}


# By rank: the experts of each block that are called in each step.
CALLED = {
    "other experts on each rank": lambda rank, turn: [[rank], [rank, (rank + 1) % 4], [3 - rank]],
    "none on some ranks": lambda rank, turn: [[] if rank else [1], [0, 2], [] if rank == turn else [3]],
    "none at all": lambda rank, turn: [[], [1] if turn else [], []],
}


def called(which):
    """(how lossless differs from stock with leaf modules, losses of zeropp and of stock)."""
    rank = dist.get_rank()
    data = [(tokens, CALLED[which](rank, turn)) for turn, tokens in enumerate(batches(3, rank))]
    traces = {}
    for name in (None, "lossless", "zeropp"):
        leaves = () if name else (Routed,)
        spec = Spec(name and section(name, gather_granularity="block"), model=Sparse, leaves=leaves)
        traces[name] = run(spec, [step] * 3, ["masters"], data=data)
    return differing(traces[None], traces["lossless"]), traces["zeropp"].losses, traces[None].losses
