"""The training phase of PPO: milliseconds and bytes between nodes of a minibatch, and the memory of the four models.

    python -m benchmarks.rlhf_step --out rlhf_step.json                       # one GPU, or small models on a CPU
    python -m benchmarks.rlhf_step --ranks 2 --gbit 25 --out rlhf_step.json   # two emulated nodes; as root

Random Llamas in bf16; critic and reward model have the actor's size, with a head of one output instead of the lm_head.
Roles, losses and both phases are those of examples/rlhf/ppo.py. Trained with LoRA (rank 16, all linear layers, AdamW):

stock-lora   stock DeepSpeed's ZeRO-3: policy and reference are adapters over one model, critic and reward over another
stock-four   stock's, with reference and reward model as models of their own, as in DeepSpeed-Chat
qlora        recipe qlora, like stock-lora: four models, of which two are stored, in NF4

and with all weights of actor and critic:

stock-full   stock's, states in fp32; reference and reward model in bf16
zeropp       recipe zeropp; reference and reward model are stored in the format in which weights travel
fp8-lm, fp8-lm-zeropp   those recipes, the same

Stock's decoder layers are z3 leaf modules (--no-leaf: not). Activations are kept, not computed again. Each run has
processes of its own. An iteration, after --warmup others, is a micro-batch of --batch random sequences on each rank:

experience   log-probabilities of policy and reference, values, scores of the reward model
training     actor: forward, backward, step; critic: the same

All ranks begin a phase together and the slowest counts; the median of --steps iterations. Bytes of the rank with most:

weights      parameters of all four models, adapters included, as they rest: shards, or codes with their scales
states       master weights, reduced gradients and moments, after the first step; divided by the trained parameters
secondary    weights that ranks of a node keep (hpZ), also while unused
rest         all else that is allocated between iterations: gathered weights that stay, buffers for gathers and buckets
all          the sum of these
peak         the most during the training phase, activations included (on a GPU)

Weights are compared with four models in bf16: as computed (2 bytes per parameter, nothing else), and as stock-four or
stock-full has them. On a CPU "all" is the sum over living tensors that Python finds.

--limit instead finds the largest --batch that fits, by doubling from --start until memory is out and then halving the
interval --refine times (limits.py; both phases, tokens/s of both); --gib makes the GPU smaller.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch

from benchmarks.harness.command import add_link, add_steps, choose_runs, command, cut_into_nodes
from benchmarks.harness.measuring import Meter, timed
from benchmarks.harness.nodes import sent_bytes, set_rate_everywhere
from benchmarks.harness.question import Question, runs_apart
from benchmarks.harness.rlhf_runs import RUNS, add_rollouts, made
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.tables import cell

STOCK = tuple(name for name, run in RUNS.items() if run.section is None)
FOUR = {True: "stock-four", False: "stock-full"}  # by `lora`: who has four models in bf16
KINDS = ("weights", "states", "secondary", "rest", "all")


# -- measuring, in every rank ----------------------------------------------------------------------------------------


def measure(name: str, args, device: torch.device) -> dict:
    """The row of a run."""
    from benchmarks.harness.ppo_models import bytes_by_kind, random_rollouts

    if args.gbit is not None:
        set_rate_everywhere(None)  # what is sent while it is built is not measured
    meter = Meter(device)
    models = made(name, args, device)

    def at_rest() -> dict[str, int]:
        total, kinds = meter.bytes(), bytes_by_kind(models)
        return kinds | {"rest": total - sum(kinds.values()), "all": total}

    built = at_rest()
    if args.gbit:
        set_rate_everywhere(args.gbit)
    rollouts = random_rollouts(SIZES[args.size].vocabulary, args.batch, args.prompt, args.tokens, device)
    times, sent, peaks, losses = [], [], [], []
    for iteration in range(args.warmup + args.steps):
        rollout = next(rollouts)
        counters = [_sent()]
        experience_ms, experience = timed(partial(models.experience, rollout), device)
        counters.append(_sent())
        meter.start_peak()
        training_ms, figures = timed(partial(models.train, experience), device)
        peaks.append(meter.peak())
        counters.append(_sent())
        times.append((experience_ms, training_ms))
        sent.append((counters[1] - counters[0], counters[2] - counters[1]))
        losses.append({name: loss.item() for name, loss in figures.items()})
        del rollout, experience, figures
        if iteration == 0:
            rest = at_rest()
    mine = {"bytes": rest, "built": built, "peak": max(peaks[args.warmup :], key=lambda peak: peak or 0)}
    mine |= {"times": times[args.warmup :], "sent": sent[args.warmup :], "losses": losses}
    gathered = [None] * args.ranks
    torch.distributed.all_gather_object(gathered, mine)
    row = _over_ranks(gathered) | {
        "run": name,
        "parameters": models.parameters,
        "trained_parameters": models.trained_parameters,
    }
    if args.gbit is None:
        row["training_tx_bytes_per_node"] = row["experience_tx_bytes_per_node"] = None
    models.close()
    return row


def _sent() -> int:
    """Bytes that this node has sent, once nobody is sending."""
    torch.distributed.barrier()
    return sent_bytes()


def _over_ranks(gathered: list[dict]) -> dict:
    """Of each iteration the slowest rank, the node that sent most, mean losses; bytes of the rank that has most."""
    losses = zip(*(each["losses"] for each in gathered))
    row = {"losses": [{key: statistics.fmean(loss[key] for loss in ranks) for key in ranks[0]} for ranks in losses]}
    for index, phase in enumerate(("experience", "training")):
        times = [max(step[index] for step in steps) for steps in zip(*(each["times"] for each in gathered))]
        sent = [max(step[index] for step in steps) for steps in zip(*(each["sent"] for each in gathered))]
        row |= {f"{phase}_ms": statistics.median(times), f"{phase}_times_ms": times}
        row[f"{phase}_tx_bytes_per_node"] = statistics.median(sent)
    for when in ("bytes", "built"):
        row[when] = max((each[when] for each in gathered), key=lambda kinds: kinds["all"])
    row["peak_bytes"] = max((each["peak"] for each in gathered), key=lambda peak: peak or 0)
    return row


# -- from one process ------------------------------------------------------------------------------------------------


def compare(rows: list[dict], ranks: int) -> list[dict]:
    """A line per run, of several rounds the fastest."""
    by_run: dict[str, dict] = {}
    for row in sorted(rows, key=lambda row: -row["training_ms"]):
        by_run[row["run"]] = row
    lines = []
    for name in (name for name in RUNS if name in by_run):
        row, lora = by_run[name], RUNS[name].lora
        weights = row["bytes"]["weights"]
        line = {key: row[key] for key in ("run", "training_ms", "experience_ms", "peak_bytes")}
        line |= {f"{kind}_bytes": row["bytes"][kind] for kind in KINDS}
        line["training_tx_bytes_per_node"] = row["training_tx_bytes_per_node"]
        line["states_per_trained_parameter"] = row["bytes"]["states"] * ranks / row["trained_parameters"]
        line["of_bf16_computed"] = weights / (2 * row["parameters"] / ranks)
        four = by_run.get(FOUR[lora])
        line["of_bf16_measured"] = None if four is None else weights / four["bytes"]["weights"]
        for stock in STOCK:
            comparable = stock in by_run and RUNS[stock].lora == lora
            line[f"times_{stock}"] = by_run[stock]["training_ms"] / row["training_ms"] if comparable else None
        lines.append(line)
    return lines


def show(result: dict) -> None:
    """Print the table."""
    settings = result["settings"]
    large = max(line["weights_bytes"] for line in result["comparison"]) >= 2**30
    name, unit = ("GiB", 2**30) if large else ("MiB", 2**20)
    nodes, ranks = settings["nodes"], settings["ranks"]
    link = f", {settings['gbit']:g} Gbit/s between nodes" if settings["gbit"] else ""
    print(
        f"\nPPO: four Llamas {settings['size']}, {nodes} node(s) x {ranks // nodes} rank(s){link}, a minibatch of "
        f"{settings['batch']} x {settings['prompt']}+{settings['tokens']} tokens per rank; memory in {name} a rank"
    )
    print(
        f"{'':<11}{'training':>10}{'x stock-':>9}{'x stock-':>9}{'x stock-':>9}{'experience':>12}{'MB between':>12}"
        f"{'weights':>9}{'% of bf16':>11}{'% of bf16':>11}{'states':>8}{'states B':>10}{'secondary':>11}{'rest':>8}"
        f"{'all':>8}{'peak':>8}\n"
        f"{'':<11}{'ms':>10}{'lora':>9}{'four':>9}{'full':>9}{'ms':>12}{'nodes':>12}"
        f"{'':>9}{'computed':>11}{'measured':>11}{'':>8}{'a trained':>10}"
    )
    for line in result["comparison"]:
        columns = [(line["training_ms"], 10, 1, 1)]
        columns += [(line[f"times_{stock}"], 9, 2, 1) for stock in STOCK]
        columns += [(line["experience_ms"], 12, 1, 1), (line["training_tx_bytes_per_node"], 12, 1, 1e6)]
        columns += [(line["weights_bytes"], 9, 2, unit)]
        columns += [(line[f"of_bf16_{how}"], 11, 1, 0.01) for how in ("computed", "measured")]
        columns += [(line["states_bytes"], 8, 2, unit), (line["states_per_trained_parameter"], 10, 2, 1)]
        columns += [(line["secondary_bytes"], 11, 2, unit)]
        columns += [(line[f"{kind}_bytes"], 8, 2, unit) for kind in ("rest", "all", "peak")]
        print(f"{line['run']:<11}" + "".join(cell(column[0], column[2], column[3], column[1]) for column in columns))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "rlhf_step", RUNS, SIZES, "1.3b" if on_gpu else "tiny-gqa")
    add_link(parser)
    add_rollouts(parser)
    add_steps(parser, steps=3, warmup=2, rounds=1, least_warmup=1)  # moments are made and kernels compiled
    args = parser.parse_args(argv)
    cut_into_nodes(args, parser)
    choose_runs(args, parser, RUNS)
    return args


QUESTION = Question(
    name="rlhf_step",
    parse=parse,
    settings=("size", "ranks", "nodes", "gbit", "batch", "prompt", "tokens", "steps", "warmup", "leaf"),
    jobs=runs_apart,
    work=measure,
    line=lambda row: f"{row['run']}: {row['training_ms']:.1f} ms a minibatch",
    compared=lambda result: {"comparison": compare(result["rows"], result["settings"]["ranks"])},
    show=show,
    folders=("examples", "examples/rlhf"),
)

if __name__ == "__main__":
    QUESTION.answer()
