"""Jobs in which some ranks run a model, or a part of it, whose parameters all ranks have gathered."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from models import batches, llama, needs_16_bits
from recipes import section_of
from running import Spec, Trace, backward, forward, freezing, on_engine, run, step, update, within
from torch import Tensor, nn

STORED = {"modules": "frozen", "format": "nf4", "block_size": 32}
KEEPING = {  # DeepSpeed's defaults: fetched ahead as learned, and kept until needed again
    "stage3_prefetch_bucket_size": 10**8,
    "stage3_max_reuse_distance": 10**9,
    "stage3_max_live_parameters": 10**9,
}
WHEN = ("before a step", "between forward and backward", "between backward and step")


class Excursion(NamedTuple):
    """Modules that some ranks run between collectives of a training.

    Attributes:
        step, when: the micro-batch, and one of WHEN.
        gathered: names of modules whose parameters all ranks gather; "" is the model.
        what: one of RUNS.
        ranks: that run it.
        modifier_rank: of GatheredParameters.
    """

    step: int
    when: str
    gathered: tuple[str, ...]
    what: str
    ranks: tuple[int, ...]
    modifier_rank: int | None = None


def evaluate(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens).logits


def evaluate_twice(model: nn.Module, tokens: Tensor) -> Tensor:
    return evaluate(model, tokens) + evaluate(model, tokens)


def generate(model: nn.Module, tokens: Tensor) -> Tensor:
    return model.generate(tokens, max_new_tokens=3, do_sample=False, use_cache=True, synced_gpus=False)


def last_layer_first(model: nn.Module, tokens: Tensor) -> Tensor:
    """Layers by themselves, in another order than training fetches them."""
    hidden = torch.ones(1, 2, model.config.hidden_size, dtype=model.dtype)
    positions = model.model.rotary_emb(hidden, torch.arange(2)[None])
    with torch.no_grad():
        for layer in reversed(model.model.layers):
            output = layer(hidden, position_embeddings=positions)
            hidden = output[0] if isinstance(output, tuple) else output
    return hidden


def head_often(model: nn.Module, tokens: Tensor) -> Tensor:
    """So often that it counts as a loop of its own."""
    hidden = torch.ones(1, 2, model.config.hidden_size, dtype=model.dtype)
    with torch.no_grad():
        return sum(model.lm_head(model.model.norm(hidden)) for _ in range(20))


LAYERS, HEAD = ("model.layers",), ("lm_head", "model.norm")
# What is run, and the least that has to be gathered for it.
RUNS = {
    "evaluate": (evaluate, ("",)),
    "evaluate twice": (evaluate_twice, ("",)),
    "generate": (generate, ("",)),
    "last layer first": (last_layer_first, LAYERS),
    "head often": (head_often, HEAD),
}


def parameters_of(model: nn.Module, names: Sequence[str]) -> list[nn.Parameter]:
    return list({id(p): p for name in names for p in model.get_submodule(name).parameters()}.values())


def _plain_copy(model: nn.Module) -> nn.Module:
    """The model as one process has it, with the values that are there."""
    here = {name: param.detach().clone() for name, param in model.named_parameters() if param.numel()}
    plain = llama().to(model.dtype)
    plain.load_state_dict(here, strict=False)
    return plain


def _sent(engine) -> tuple:
    ledger = engine.optimizer.session.ledger
    return copy.deepcopy((ledger.pending, ledger.outside))


def _go(engine, excursion: Excursion, exact: bool) -> None:
    import deepspeed

    model, tokens = engine.module, torch.arange(8)[None]
    run, needed = RUNS[excursion.what]
    params = parameters_of(model, excursion.gathered)
    whole = {id(p) for p in params} >= {id(p) for p in parameters_of(model, needed)}
    with deepspeed.zero.GatheredParameters(params, modifier_rank=excursion.modifier_rank):
        before = _sent(engine)
        if dist.get_rank() in excursion.ranks:
            found = run(model, tokens)
            assert not (exact and whole) or torch.equal(found, run(_plain_copy(model), tokens)), "of other weights"
        assert not whole or _sent(engine) == before, "something was sent"
        assert all(param.numel() == param.ds_numel for param in params), "values were dropped"


def with_excursions(way: str, dtype: str, keeps: bool, granularity: str, excursions: Sequence[Excursion]) -> tuple:
    """A training without them, and with them.

    `way`: of WAYS, or "stored".
    """
    name, fields = ("zeropp", {"frozen": STORED}) if way == "stored" else (way, {})
    section = section_of(name, gather_granularity=granularity, **fields)
    # In bf16 another way of multiplying the same weights rounds otherwise.
    exact = dtype == "fp32" and not (needs_16_bits(section) or "compute" in section)
    exact = exact and not section["recipe"].startswith("mx")
    config = {"gradient_accumulation_steps": 2, "zero_optimization": KEEPING if keeps else {}}

    def trained(excursions: Sequence[Excursion]) -> Trace:
        events = []
        for index in range(6):
            for when, event in zip(WHEN, (forward, backward, update)):
                here = [each for each in excursions if (each.step, each.when) == (index, when)]
                events += [*(on_engine(_go, each, exact) for each in here), event]
        spec = Spec(section, dtype, config, adapted=freezing(*["mlp"] * ("frozen" in section)))
        return run(spec, events, ("weights",), batches(6, dist.get_rank(), length=8))

    return trained(()), trained(excursions)


def _gathered(engine, names: Sequence[str] = ("",)):
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters_of(engine.module, names))


def whole_steps(way: str, granularity: str) -> tuple:
    """A training, and one whose passes run in GatheredParameters, with the bytes that they sent."""
    spec = Spec(section_of(way, gather_granularity=granularity))
    plain, inside = [step] * 3, [within(_gathered, forward, backward), update] * 3
    left = ("weights", "bytes")
    return tuple(run(spec, events, left, batches(3, dist.get_rank(), length=8)) for events in (plain, inside))


def lens(way: str, granularity: str) -> tuple:
    """A training with a gathered head, and one in which a hook of a rank uses it besides."""
    spec = Spec(section_of(way, gather_granularity=granularity), config={"zero_optimization": KEEPING})

    def hook(engine) -> None:
        model = engine.module

        def look(layer, args, output) -> None:
            with torch.no_grad():
                model.lm_head(model.model.norm(output[0] if isinstance(output, tuple) else output))

        if dist.get_rank() == 0:
            model.model.layers[0].register_forward_hook(look)

    steps = [within(lambda engine: _gathered(engine, HEAD), forward), backward, update] * 4
    return tuple(
        run(spec, [*before, *steps], ("weights",), batches(4, dist.get_rank(), length=8))
        for before in ((), (on_engine(hook),))
    )


def generation_inside(way: str, weights: str) -> None:
    """zeropp_fp8.generation uses the values that are there, and leaves them."""
    import zeropp_fp8

    tokens = torch.arange(8)[None]

    def generating(engine) -> None:
        before, expected = _sent(engine), generate(_plain_copy(engine.module), tokens)
        with zeropp_fp8.generation(engine, weights=weights) as model:
            assert torch.equal(generate(model, tokens), expected)
        assert _sent(engine) == before
        assert all(param.numel() == param.ds_numel for param in engine.module.parameters())

    def check_dropped(engine) -> None:
        assert not any(param.numel() for param in engine.module.parameters())

    run(Spec(section_of(way)), [step, within(_gathered, on_engine(generating)), on_engine(check_dropped)])


def a_rank_alone(way: str, gathered: Sequence[str], granularity: str) -> str:
    """Return what a rank says that runs a model of which only these modules are gathered, while the other does not."""
    engine = Spec(section_of(way, gather_granularity=granularity)).engine()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    store, said = dist.distributed_c10d._get_default_store(), ""
    with _gathered(engine, gathered):
        if dist.get_rank() == 0:
            try:
                evaluate(engine.module, torch.arange(8)[None])
            except RuntimeError as error:
                said = str(error)
            store.set("said", said)
        else:
            store.wait(["said"])
    return said
