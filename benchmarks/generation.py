"""Generation with the model of a ZeRO-3 engine: milliseconds per token, bytes between nodes, memory.

    python -m benchmarks.generation --ranks 4 --gbit 25 --out generation.json      # two emulated nodes; as root
    python -m benchmarks.generation --ranks 1                                      # one GPU, or a small model on a CPU

transformers' `generate`, greedy, KV cache, random Llama or mixture in bf16, a prompt of random tokens, the same for all
runs:

plain, plain-lora     no DeepSpeed: the whole model on each GPU; with LoRA beside the layers
stock, stock-leaf     stock DeepSpeed's ZeRO-3; with decoder layers as z3 leaf modules
stock-hpz             stock with secondary shards inside a node (zero_hpz_partition_size)
sharded               zeropp: `zeropp_fp8.generation(engine, weights="sharded")`, what is gathered comes from the node
lossless              the same without a copy in the node, in 16 bits
sharded-used, ...     of mixtures: the experts that some rank has tokens for (`"experts": {"gather": "used"}`)
values, codes         zeropp: all weights, or their INT8 codes, stay on each rank for the rollout
qlora-values          NF4 store with LoRA; adapters merged into the values that stay
qlora-codes           the same with codes that stay, and adapters beside them
qlora-rank            codes that are on each rank anyway (secondary.scope "rank")
...-graph             the same with `graph=True`: a token's pass is a CUDA graph; only on a GPU
plain-compiled        plain with transformers' static cache, for which it compiles a token's pass on a GPU

A rollout is one call of `generate`. What is entered is timed by itself ("enter": weights are gathered and kept). Every
run makes --tokens new tokens, those that gather for each token --slow-tokens; all ranks begin together. The time of a
token is that of a rollout less that of one with a single new token, divided by the tokens between.

What bounds it: "host" is how long Python takes to issue a token's forward pass, without `generate` around it; "kernels"
how long the GPU computes in one, of so many "launches". --profile lists kernels and functions of one pass.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.harness import profiling
from benchmarks.harness.command import add_link, choose_runs, command, cut_into_nodes
from benchmarks.harness.hf_llama import maker_of, sharded_model
from benchmarks.harness.lora import adamw, with_adapters
from benchmarks.harness.measuring import Meter, host_ms, random_tokens, timed
from benchmarks.harness.nodes import sent_bytes, set_rate_everywhere
from benchmarks.harness.question import Question
from benchmarks.harness.sizes import EVERY_SIZE, MIXTURES
from benchmarks.harness.tables import cell
from benchmarks.harness.zero3 import ds_config
from examples.options import whole

# run: (section of the plugin, what stays, LoRA)
RUNS: dict[str, tuple[dict | None, str | None, bool]] = {
    "plain": (None, None, False),
    "plain-lora": (None, None, True),
    "stock": (None, None, False),
    "stock-leaf": (None, None, False),
    "stock-hpz": (None, None, False),
    "sharded": ({"recipe": "zeropp"}, "sharded", False),
    "sharded-used": ({"recipe": "zeropp", "experts": {"gather": "used"}}, "sharded", False),
    "lossless": ({"recipe": "lossless"}, "sharded", False),
    "lossless-used": ({"recipe": "lossless", "experts": {"gather": "used"}}, "sharded", False),
    "values": ({"recipe": "zeropp"}, "values", False),
    "codes": ({"recipe": "zeropp"}, "codes", False),
    "qlora-values": ({"recipe": "qlora"}, "values", True),
    "qlora-codes": ({"recipe": "qlora"}, "codes", True),
    "qlora-rank": ({"recipe": "qlora", "secondary": {"scope": "rank"}}, "codes", True),
}
GRAPH = "-graph"
RUNS |= {run + GRAPH: RUNS[run] for run in ("values", "codes", "qlora-values", "qlora-codes")}
COMPILED = "plain-compiled"
RUNS[COMPILED] = RUNS["plain"]
PLAIN = ("plain", "plain-lora", COMPILED)
USED = ("sharded-used", "lossless-used")
SLOW = ("stock", "stock-leaf", "stock-hpz", "sharded", "lossless", *USED)


# -- measuring, in every rank ----------------------------------------------------------------------------------------


def plain_model(run: str, args, device: torch.device) -> nn.Module:
    """A whole model on this rank's device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if args.bf16 else torch.float32)
    with device:
        model = maker_of(EVERY_SIZE[args.size])()
    torch.set_default_dtype(before)
    return (with_adapters(model, 0) if RUNS[run][2] else model).eval()


def engine_of(run: str, args, device: torch.device):
    """A ZeRO-3 engine that could train."""
    import deepspeed

    import zeropp_fp8

    section, _, lora = RUNS[run]
    zeropp_fp8.disable() if section is None else zeropp_fp8.enable()
    config = ds_config(section, args.batch, small=EVERY_SIZE[args.size].small, lean=False, bf16=args.bf16)
    if run == "stock-hpz":
        config["zero_optimization"]["zero_hpz_partition_size"] = args.ranks // args.nodes
    model = sharded_model(EVERY_SIZE[args.size], config)
    model = with_adapters(model, 0) if lora else model
    if run == "stock-leaf":
        deepspeed.utils.set_z3_leaf_modules(model, ["LlamaDecoderLayer", "Qwen3MoeDecoderLayer"])
    return deepspeed.initialize(model=model, optimizer=adamw(model, device), config=config)[0]


@contextlib.contextmanager
def ready(run: str, engine) -> Iterator[nn.Module]:
    """The model, ready to generate."""
    import zeropp_fp8

    if RUNS[run][1] is None:
        module = engine if run in PLAIN else engine.module
        module.eval()
        yield module
        return
    with zeropp_fp8.generation(engine, weights=RUNS[run][1], graph=run.endswith(GRAPH)) as module:
        yield module


def pass_of_a_token(model: nn.Module, prompt: Tensor, static: bool) -> Callable[[], None]:
    """The forward pass of a token behind a prompt, of one more at each call.

    With a static cache the mask is that of the first of them: made in the pass, it would ask the GPU for a length.
    """
    from transformers import StaticCache
    from transformers.generation import GenerationMixin

    cache, more = None, {}
    inner = next(m for m in model.modules() if isinstance(m, GenerationMixin))
    if static:
        cache = StaticCache(inner.config, max_cache_len=prompt.shape[1] + 64)
    with torch.no_grad():
        cache = model(input_ids=prompt, past_key_values=cache, use_cache=True).past_key_values
    if static:
        places = torch.arange(prompt.shape[1] + 1, device=prompt.device).expand(len(prompt), -1)
        attended = torch.ones_like(places)
        made = inner.prepare_inputs_for_generation(
            attended, 1, past_key_values=cache, attention_mask=attended, position_ids=places
        )
        more = {name: made[name] for name in ("attention_mask", "position_ids")}

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=prompt[:, -1:], past_key_values=cache, use_cache=True, **more)

    for _ in range(2):  # a graph is recorded at the second
        forward()
    return forward


def bounds(model: nn.Module, prompt: Tensor, device: torch.device, count: int, static: bool) -> dict:
    """Return the parts of a row that say whether a token waits for the host or the GPU, the `count` largest of each."""
    forward = pass_of_a_token(model, prompt, static)
    found = {"host_ms": host_ms(forward, device)}
    if device.type == "cuda":
        profile = profiling.device_profile(forward, count)
        found |= {"kernels_ms": profile["computing_ms"], "launches": profile["launches"], "device": profile}
    return found | ({"host": profiling.host_profile(forward, count)} if count else {})


def measure(run: str, args, device: torch.device) -> dict:
    """The row of a run."""
    if args.gbit is not None:
        set_rate_everywhere(None)
    meter = Meter(device)
    engine = plain_model(run, args, device) if run in PLAIN else engine_of(run, args, device)
    if args.gbit:
        set_rate_everywhere(args.gbit)
    prompt = next(random_tokens(EVERY_SIZE[args.size].vocabulary, args.batch, args.prompt, device))
    tokens = args.slow_tokens if run in SLOW else args.tokens
    synced = run not in PLAIN and RUNS[run][1] is None and args.ranks > 1
    options = {"do_sample": False, "pad_token_id": 0, "use_cache": True} | ({"synced_gpus": True} if synced else {})
    options |= {"cache_implementation": "static"} if run == COMPILED else {}

    def generate(model: nn.Module, new: int) -> Tensor:
        attention = torch.ones_like(prompt)
        return model.generate(
            input_ids=prompt, attention_mask=attention, max_new_tokens=new, min_new_tokens=new, **options
        )

    with ready(run, engine) as model:  # compiles kernels, fills the order of gathers
        generate(model, 1 + tokens if run == COMPILED else 2)  # a static cache of another length is compiled anew
    before = meter.bytes()
    meter.start_peak()
    stack = contextlib.ExitStack()
    entered, model = timed(lambda: stack.enter_context(ready(run, engine)), device)
    kept = meter.bytes() - before
    one, _ = timed(lambda: generate(model, 1), device)
    sent = sent_bytes()
    whole, _ = timed(lambda: generate(model, 1 + tokens), device)
    torch.distributed.barrier()
    sent = sent_bytes() - sent
    peak = meter.peak()
    # transformers holds what it has compiled to itself.
    bounded_by = {} if run == COMPILED else bounds(model, prompt, device, args.profile, run.endswith(GRAPH))
    left, _ = timed(stack.close, device)
    row = {
        "run": run,
        "token_ms": (whole - one) / tokens,
        "prompt_ms": one,
        "enter_ms": entered,
        "leave_ms": left,
        "tokens": tokens,
        "tokens_per_s": 1e3 * args.batch * args.ranks * tokens / (whole - one),
        "kept_bytes": kept,
        "rest_bytes": before,
        "after_bytes": meter.bytes(),
        "peak_bytes": peak,
        "tx_bytes_per_node_token": sent / tokens if args.gbit is not None else None,
        **bounded_by,
    }
    gathered = [None] * args.ranks
    torch.distributed.all_gather_object(gathered, row)
    slowest = max(gathered, key=lambda other: other["token_ms"])
    if run not in PLAIN:
        engine.destroy()
    return {"round": args.round, **slowest}


def show(result: dict) -> None:
    """Print the table."""
    settings, rows = result["settings"], {}
    for row in sorted(result["rows"], key=lambda row: -row["token_ms"]):
        rows[row["run"]] = row  # of several rounds the fastest
    rows = {run: rows[run] for run in RUNS if run in rows}
    link = f", {settings['gbit']:g} Gbit/s between nodes" if settings["gbit"] else ""
    nodes, ranks = settings["nodes"], settings["ranks"]
    print(
        f"\nGeneration: {settings['size']}, {nodes} node(s) x {ranks // nodes} rank(s){link}, "
        f"{settings['batch']} sequences a rank, prompt of {settings['prompt']} tokens"
    )
    print(
        f"{'':<14}{'ms a':>9}{'prompt':>9}{'enter':>9}{'leave':>8}{'kept':>8}{'stored':>9}{'peak':>8}"
        f"{'MB between':>12}{'x plain':>9}{'stock / it':>12}{'hpz / it':>10}{'host':>8}{'kernels':>9}{'launches':>10}\n"
        f"{'':<14}{'token':>9}{'ms':>9}{'ms':>9}{'ms':>8}{'GiB':>8}{'GiB':>9}{'GiB':>8}{'a token':>12}{'':31}"
        f"{'ms':>8}{'ms':>9}"
    )
    for run, row in rows.items():
        against = [rows[name]["token_ms"] if name in rows else None for name in ("plain", "stock", "stock-hpz")]
        ratios = [None if against[0] is None else row["token_ms"] / against[0]]
        ratios += [None if other is None else other / row["token_ms"] for other in against[1:]]
        gib = [None if row[key] is None else row[key] / 2**30 for key in ("kept_bytes", "rest_bytes", "peak_bytes")]
        sent = row["tx_bytes_per_node_token"]
        print(
            f"{run:<14}{row['token_ms']:>9.1f}{row['prompt_ms']:>9.1f}{row['enter_ms']:>9.1f}{row['leave_ms']:>8.1f}"
            + "".join(cell(value, 2, width=width) for value, width in zip(gib, (8, 9, 8)))
            + cell(sent, 1, 1e6, 12)
            + "".join(cell(value, 2, width=width) for value, width in zip(ratios, (9, 12, 10)))
            + "".join(
                cell(row.get(key), digits, width=width)
                for key, digits, width in (("host_ms", 1, 8), ("kernels_ms", 1, 9), ("launches", 0, 10))
            )
        )
    for run, row in rows.items():
        for title, entries in (
            ("kernels", row.get("device", {}).get("kernels")),
            ("CUDA calls of the host", row.get("device", {}).get("cuda_calls")),
            ("Python functions by their own time, under cProfile", row.get("host", {}).get("functions")),
        ):
            if entries:
                print(f"\n{run}: {title} of one token's forward pass")
                profiling.show_top(entries)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "generation", RUNS, EVERY_SIZE, "1.3b" if on_gpu else "tiny-gqa")
    add_link(parser)
    parser.add_argument("--batch", type=whole(1), default=8, help="sequences of a rank (default %(default)s)")
    parser.add_argument("--prompt", type=whole(1), default=256 if on_gpu else 16, help="tokens (default %(default)s)")
    parser.add_argument("--tokens", type=whole(1), default=64 if on_gpu else 8, help="new tokens (default %(default)s)")
    parser.add_argument(
        "--slow-tokens", type=whole(1), default=8 if on_gpu else 4, help="of runs that gather for each one"
    )
    parser.add_argument(
        "--rounds", type=whole(1), default=1, help="every other one backwards; the table has the fastest"
    )
    parser.add_argument("--profile", type=whole(0), default=0, metavar="N", help="list N kernels and Python functions")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=on_gpu)
    args = parser.parse_args(argv)
    cut_into_nodes(args, parser)
    # hpZ in DeepSpeed itself needs a node of several ranks.
    possible = [run for run in RUNS if run != "stock-hpz" or (args.nodes == 2 and args.ranks > 2)]
    possible = [run for run in possible if run not in USED or args.size in MIXTURES]
    choose_runs(args, parser, [run for run in possible if on_gpu or not run.endswith(GRAPH)])
    return args


QUESTION = Question(
    name="generation",
    parse=parse,
    settings=("size", "ranks", "nodes", "gbit", "batch", "prompt", "bf16"),
    work=measure,
    line=lambda row: f"{row['run']}: {row['token_ms']:.1f} ms per token",
    compared=lambda result: {},
    show=show,
)

if __name__ == "__main__":
    QUESTION.answer()
