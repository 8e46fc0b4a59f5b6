"""Jobs with mixtures of experts of which only those are gathered that some rank has tokens for."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import transformers
from models import batches, section
from ranks import attempt, printed
from running import (
    Spec,
    accumulated,
    backward,
    differing,
    evaluate,
    evaluated,
    forward,
    on_engine,
    resumed,
    run,
    see,
    shared_folder,
    step,
    stepped,
    update,
)

import zeropp_fp8
from zeropp_fp8.zero.fall_back import fall_back
from zeropp_fp8.zero.gather.used_experts import InParts

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = 16
KINDS = {
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": EXPERTS},
    "Qwen3Moe": {
        **{"num_key_value_heads": 2, "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        "head_dim": 16,
    },
    "GptOss": {"num_key_value_heads": 2, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "head_dim": 16},
}
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


def mixture(kind, seed=0, **options):
    torch.manual_seed(seed)
    options = {"vocab_size": 256, "use_cache": False, "pad_token_id": None, **SIZES, **KINDS[kind], **options}
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**options))


QWEN = functools.partial(mixture, "Qwen3Moe")


def checkpointed(reentrant, model):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


def adapted(model):
    """LoRA of attention and of packed experts, whose effect is not zero from the start."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    options = {"target_modules": ["q_proj"], "target_parameters": STACKS, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(r=4, **options), autocast_adapter_dtype=False)


def few(steps, tokens=3, seed=1):
    """Micro-batches of one sequence of a few tokens."""
    return [batch[:1, :tokens] for batch in batches(steps, dist.get_rank(), seed=seed)]


def _brought(engine):
    """How many experts the last gather of each unit in parts has brought."""
    units = [unit for unit in engine.optimizer.gatherer.units if isinstance(unit, InParts)]
    return [EXPERTS if unit.brought is None else len(unit.brought) for unit in units]


def _two_before(running):
    """Two forwards, then their backwards, the first one's first."""
    losses = []
    for _ in range(2):
        forward(running)
        losses.append(running.loss)
    for loss in losses:
        running.loss = loss
        backward(running)


def a_rank_alone():
    """Rank 0's losses in a forward of its own with all weights gathered, with all and with used; of others None."""

    def alone(engine):
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())), torch.no_grad():
            if dist.get_rank() == 0:
                tokens = few(1)[0]
                return engine.module(input_ids=tokens, labels=tokens).loss.item()
        return None

    found = []
    for gather in ("all", "used"):
        spec = Spec(section("lossless", experts={"gather": gather}), model=QWEN)
        trace = run(spec, [step, see(alone), step], data=few(2))
        found.append((trace.losses, trace.seen[0]))
    return found


def bytes_of_a_step():
    """(bytes that this rank sends in the forward of a step, all and used; experts that each layer has not brought)."""
    found, unused = [], []
    for gather in ("all", "used"):
        spec = Spec(section("lossless", experts={"gather": gather}), model=QWEN)
        trace = run(spec, [step, see(_brought)], ["bytes"], data=few(1))
        found.append(sum(trace.bytes["weights_forward"].values()))
        unused = [EXPERTS - count for count in trace.seen[0]]
    return *found, unused


def all_and_used(kind, recipe, fields=None, adapt=None, how="steps", dtype="fp32", config=None, **options):
    """How training with what is used differs from training with all, both's bytes, and what was brought."""
    events = {
        "steps": [*[step] * 3, evaluate(few(1, seed=5)[0]), step],
        "accumulated": [*accumulated(2), *accumulated(2)],
        "two before": [_two_before, update, _two_before, update],
    }[how]
    accumulation = {"steps": 1, "accumulated": 2, "two before": 2}[how]
    config, traces = {"gradient_accumulation_steps": accumulation, **(config or {})}, []
    for gather in ("all", "used"):
        spec = Spec(
            section(recipe, experts={"gather": gather}, **(fields or {})),
            dtype,
            config=config,
            model=functools.partial(mixture, kind, **options),
            adapted=adapt,
        )
        traces.append(run(spec, [*events, see(_brought)], ["masters", "weights", "bytes"], data=few(8)))
    all_of_them, used = traces
    return differing(all_of_them, used, but=("bytes", "seen")), all_of_them.bytes, used.bytes, used.seen[0]


def _outside(engine):
    return zeropp_fp8.wire_report(engine)["outside_steps"]


class Alone(torch.nn.Module):
    """Blocks of experts, of whose tokens the first `some` are computed, which may be none."""

    def __init__(self):
        super().__init__()
        model = QWEN()
        self.embedding = model.model.embed_tokens
        self.blocks = torch.nn.ModuleList(layer.mlp for layer in model.model.layers)

    def forward(self, tokens, some):
        hidden = self.embedding(tokens).flatten(0, 1)
        for block in self.blocks:
            _, weights, chosen = block.gate(hidden)
            computed = block.experts(hidden[:some], chosen[:some], weights[:some])
            hidden = torch.cat([hidden[:some] + computed, hidden[some:]])
        return hidden.float().square().mean()


def without_tokens(recipe):
    """How training with what is used differs from all: a rank without tokens, all of them, and then some again."""
    (tokens,) = few(1)
    data = [(tokens, 3), (tokens, 3 if dist.get_rank() else 0), (tokens, 0), (tokens, 2)]
    runs = []
    for gather in ("all", "used"):
        spec = Spec(section(recipe, experts={"gather": gather}), "bf16", model=Alone)
        runs.append(run(spec, [step, step, step, see(_brought), step], ["masters"], data=data))
    return differing(*runs, but=["seen"]), runs[1].seen[0]


def sampled():
    """Rows of the numerics of a step, of weights of experts, with all and with used; and what was brought."""
    found = []
    for gather in ("all", "used"):
        file = Path(shared_folder()) / "numerics.jsonl"
        numerics = {"every": 1, "parts": 1, "file": str(file)}
        spec = Spec(section("zeropp", experts={"gather": gather}, numerics=numerics), "bf16", model=QWEN)
        trace = run(spec, [step, see(_brought)], data=few(1))
        rows = json.loads(file.read_text())["rows"]
        found.append([row for row in rows if row["kind"] == "weights" and "experts" in row["layer"]])
    return *found, trace.seen[0]


def generated(recipe, fields=None, adapt=None, dtype="fp32"):
    """All experts and those used: tokens as weights are gathered for each, and as they stay; bytes; a step's loss."""
    prompt, found = few(1, tokens=4)[0], []
    for gather in ("all", "used"):
        section_of = section(recipe, experts={"gather": gather}, **(fields or {}))
        model = functools.partial(mixture, "Qwen3Moe", initializer_range=0.5)
        engine = Spec(section_of, dtype, model=model, adapted=adapt).engine()
        options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "use_cache": True}
        engine.eval()
        tokens, start = engine.module.generate(prompt, synced_gpus=True, **options), _outside(engine)
        again = engine.module.generate(prompt, synced_gpus=True, **options)
        sent = {link: number - start[link] for link, number in _outside(engine).items()}
        for weights in ("auto", "sharded", "codes"):
            with zeropp_fp8.generation(engine, weights=weights) as model:
                assert torch.equal(tokens, model.generate(prompt, **options)), weights
        assert torch.equal(tokens, again)
        engine.train()
        found.append((tokens, sent, stepped(engine, prompt)))
        engine.destroy()
    return found


def _read(running):
    """Between forward and backward everything is read; the experts' values are those that rest."""
    with deepspeed.zero.GatheredParameters(list(running.engine.module.parameters())):
        finite = all(bool(p.isfinite().all()) for p in running.engine.module.parameters())
    running.trace.seen.append(finite)


def _written(running):
    with deepspeed.zero.GatheredParameters(list(running.engine.module.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            for param in running.engine.module.parameters():
                param.data.mul_(0.5)


def disturbed(recipe, fields=None):
    """How runs differ; weights are read between forward and backward, and written, and then nothing is quantized."""
    events = [step, forward, _read, backward, update, _written, step, on_engine(_falls_back), step, step]
    traces = []
    for gather in ("all", "used"):
        spec = Spec(section(recipe, experts={"gather": gather}, **(fields or {})), model=QWEN)
        traces.append(run(spec, events, ["masters", "weights"], data=few(8)))
    return differing(*traces), traces[1].seen


def _falls_back(engine):
    if engine.zeropp_fp8_session.config.can_fall_back:
        fall_back(engine.optimizer)


def saved_and_resumed(recipe, fields=None, adapt=None):
    """How a run that goes on differs from one that resumes, with what is used."""
    spec = Spec(section(recipe, experts={"gather": "used"}, **(fields or {})), "bf16", model=QWEN, adapted=adapt)
    _, went_on, again = resumed(spec, [step] * 2, [step] * 2, ["masters", "weights"], data=few(4))
    return differing(went_on, again)


def two_engines():
    """Losses of a policy, which gathers what is used, and of a reference over the same model that gathers all; then of
    the policy alone."""
    model, data, losses = QWEN(), few(4), []
    policy = Spec(section("lossless", experts={"gather": "used"})).engine(model)
    losses.append([stepped(policy, tokens) for tokens in data[:2]])
    reference = Spec(section("lossless"), optimizer=None).engine(model)
    losses.append([evaluated(reference, tokens) for tokens in data[:2]])
    reference.destroy()
    losses.append([evaluated(policy, tokens) for tokens in data[:2]])
    losses.append([stepped(policy, tokens) for tokens in data[2:]])
    policy.destroy()
    return losses


def refused():
    """The errors of configurations and models of which no experts can be gathered alone."""
    used = {"experts": {"gather": "used"}}
    specs = {
        "owners": Spec(section("zeropp", partition="whole_tensor", **used), "bf16", model=QWEN),
        "compiled": Spec(section("zeropp", compile="blocks", **used), "bf16", model=QWEN),
        "FP8": Spec(section("zeropp", **used, compute={"format": "fp8", "min_features": 32}), "bf16", model=QWEN),
        "no experts": Spec(section("zeropp", **used), "bf16"),
    }
    return {name: attempt(spec.engine) for name, spec in specs.items()}


def tables():
    """The start table's lines on experts."""
    found = {}
    for gather in ("all", "used"):
        before = len(printed())
        Spec(section("zeropp", experts={"gather": gather}), "bf16", model=QWEN).engine().destroy()
        found[gather] = [line for line in printed()[before:].splitlines() if line.startswith("  experts")]
    return found
