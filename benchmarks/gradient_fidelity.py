"""How close a reduced gradient is to the true mean: cosine and ratio of norms, by dtype and gradient size.

    python -m benchmarks.gradient_fidelity --out gradient_fidelity.json

4 ranks as 2 nodes x 2 reduce random gradients; each row compares the joined slices with the float64 mean. CPU with gloo
or GPUs with NCCL (with fewer than 4, ranks share them, and DeepSpeed's own is left out); no namespaces, no root. So
compared are

    stock           reduce-scatter in the gradient's own dtype, divided by the ranks first, as ZeRO-3 does
    in-tree qgZ     DeepSpeed's all_to_all_quant_reduce, INT4 on both hops; GPUs only
    INT8 / INT8...  this project: the format in the node / between nodes

Then, of gradients in INT4 between nodes: --sums of them, one after the other, and how close their sum is to the
sum of the means, with error feedback and without. An optimizer adds gradients up, too. And of --micro-batches, each
reduced to the end and added up there, or added up inside the node and sent between nodes once.

A cosine of 1 and a norm ratio of 1 are exact. In-tree qgZ returns the sum over the ranks of a node (2 x), and reads the
bits of bf16 and fp32 as fp16.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.harness.environment import NO_IN_TREE, build_in_tree_op, describe, join
from benchmarks.harness.nodes import launch
from benchmarks.harness.results import write_result
from examples.options import finite, new_file, several, whole

RANKS, PER_NODE = 4, 2
IN_TREE = "in-tree qgZ"
# name: (format in the node, format between nodes, Hadamard rotation in the node, between nodes)
OURS = {
    "INT8 / INT8": ("int8", "int8", False, False),
    "INT8 / INT4 hadamard": ("int8", "int4", False, True),
    "INT4 / INT4 hadamard": ("int4", "int4", True, True),
}
FED_BACK = {"int4": ("int4", False), "int4, hadamard": ("int4", True)}  # (format between nodes, rotation) by name
DTYPES = ("float32", "bfloat16", "float16")
STDS = (1.0, 1e-2, 1e-4)


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", default="1024x1024", help="of the gradient; in-tree qgZ needs whole groups, so a power of two"
    )
    parser.add_argument("--block-size", type=whole(1), default=128, help="elements that share a scale")
    parser.add_argument("--sums", type=whole(1), default=32, help="gradients that are added up")
    parser.add_argument(
        "--micro-batches", type=several(whole(1)), default="1,8,16", help="separated by commas (default %(default)s)"
    )
    parser.add_argument("--timeout", type=finite(above=0), default=300, help="seconds for everything")
    parser.add_argument("--out", type=new_file, default="runs/gradient_fidelity.json")
    return parser.parse_args(argv)


def stock(grad, topology, args):
    """ZeRO-3's reduce_scatter_coalesced for one tensor."""
    import torch.distributed as dist
    import torch.nn.functional as F

    size = -(-grad.numel() // RANKS)
    flat = F.pad(grad.view(-1) / RANKS, (0, size * RANKS - grad.numel()))
    mine = flat.new_empty(size)
    dist.reduce_scatter_tensor(mine, flat)
    return mine


def in_tree(grad, topology, args):
    from deepspeed.runtime.comm.coalesced_collectives import all_to_all_quant_reduce

    return all_to_all_quant_reduce([grad.clone()], args.groups)[0]


def reduction_of(grad, formats, topology, args, feedback=None):
    """(plan, what takes this rank's slice, resources) of a gradient; `formats`: as in OURS."""
    from zeropp_fp8.comm.lanes import Lane
    from zeropp_fp8.comm.reduce_scatter import ReduceScatterPlan, Reduction, Rings
    from zeropp_fp8.formats import make_format

    kinds = zip(formats[:2], formats[2:])
    made = (make_format(kind, block_size=args.block_size, hadamard=rotate) for kind, rotate in kinds)
    plan, here = ReduceScatterPlan([grad.shape], [grad.dtype], topology, *made, grad.device), Lane.here()
    result = torch.zeros(plan.slice_numels[0], device=grad.device)
    kept = {} if feedback is None else {"error_feedback": feedback, "keys": ["gradient"]}
    return plan, result, Reduction(Rings.on(grad.device), here, here, **kept)


def ours(*formats):
    """One reduction. With `feedback`, what is kept of those before is in it."""

    def reduce(grad, topology, args, feedback=None):
        plan, result, reduction = reduction_of(grad, formats, topology, args, feedback)
        for _ in plan.run([grad], [result], reduction):
            pass
        return result

    return reduce


def in_node(*formats):
    """Sums of several gradients inside the node, and one hop between nodes."""

    def reduce(grads, topology, args):
        plan, result, reduction = reduction_of(grads[0], formats, topology, args)
        added = plan.new_sums(torch.float32)
        for index, grad in enumerate(grads):
            for _ in plan.sum_in_node([grad], added, reduction, accumulate=index > 0):
                pass
        for _ in plan.spread(added, [result], reduction, accumulate=False):
            pass
        return result

    return reduce


def micro_batches(topology, device, args) -> list[dict]:
    """Rows of OURS, of as many gradients as args.micro_batches says, added up at the end or in the node."""
    import torch.distributed as dist

    rows = []
    for dtype, count in itertools.product(DTYPES, args.micro_batches):
        generator = torch.Generator(device=device).manual_seed(dist.get_rank())
        grads = [torch.randn(args.shape, generator=generator, device=device) for _ in range(count)]
        grads = [grad.to(getattr(torch, dtype)) for grad in grads]
        exact = sum(mean_of(grad) for grad in grads)
        for name, of in OURS.items():
            apart = sum(ours(*of)(grad, topology, args) for grad in grads)
            for where, mine in (("at the end", apart), ("in the node", in_node(*of)(grads, topology, args))):
                row = {"dtype": dtype, "method": name, "micro_batches": count, "added": where}
                rows.append(row | closeness(mine, exact))
    return rows


def sums(topology, device, args) -> list[dict]:
    """Rows of FED_BACK, each with and without error feedback: of one gradient, and of args.sums of them added up."""
    import torch.distributed as dist

    from zeropp_fp8.comm import ErrorFeedback

    rows = []
    for name, (kind, rotate) in FED_BACK.items():
        for feedback in (None, ErrorFeedback(args.block_size)):
            generator = torch.Generator(device=device).manual_seed(dist.get_rank())
            mine, exact = 0.0, 0.0
            for count in range(1, args.sums + 1):
                grad = torch.randn(args.shape, generator=generator, device=device)
                mine += ours("int8", kind, False, rotate)(grad, topology, args, feedback)
                exact += mean_of(grad)
                if count in (1, args.sums):
                    row = {"between nodes": name, "error_feedback": feedback is not None, "added": count}
                    rows.append(row | closeness(mine, exact))
    return rows


def mean_of(grad):
    """In float64, over all ranks."""
    import torch.distributed as dist

    everyone = [torch.empty_like(grad) for _ in range(RANKS)]
    dist.all_gather(everyone, grad)
    return torch.stack([g.double() for g in everyone]).mean(0).view(-1)


def closeness(mine, exact) -> dict:
    """Join the slices on the ranks, and compare with the exact mean."""
    import torch.distributed as dist

    mine = mine.float().contiguous()
    full = mine.new_empty(RANKS * mine.numel())
    dist.all_gather_into_tensor(full, mine)
    full = full[: exact.numel()].double()
    values = {
        "cosine": torch.nn.functional.cosine_similarity(full, exact, dim=0).item(),
        "norm_ratio": (full.norm() / exact.norm()).item(),
    }
    return {key: value if math.isfinite(value) else None for key, value in values.items()}  # JSON has no NaN


def worker(args) -> None:
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    device = join(with_deepspeed=on_gpu)

    from zeropp_fp8.comm import make_topology

    topology = make_topology(ranks_per_node=PER_NODE)
    methods = {"stock": stock, **{name: ours(*of) for name, of in OURS.items()}}
    if on_gpu and torch.cuda.device_count() == PER_NODE:  # a GPU for each rank
        from deepspeed.utils import groups

        build_in_tree_op()
        args.groups = groups._get_local_all_to_all_group()
        methods[IN_TREE] = in_tree
    rows = []
    for dtype in DTYPES:
        generator = torch.Generator(device=device).manual_seed(dist.get_rank())
        for std in STDS:
            grad = torch.randn(args.shape, generator=generator, device=device).mul_(std).to(getattr(torch, dtype))
            exact = mean_of(grad)
            for name, reduce in methods.items():
                row = {"dtype": dtype, "std": std, "method": name}
                rows.append(row | closeness(reduce(grad, topology, args), exact))
    found = {
        "rows": rows,
        "sums": sums(topology, device, args),
        "micro_batches": micro_batches(topology, device, args),
    }
    if dist.get_rank() == 0:
        Path(os.environ["STORE_FILE"] + ".rows").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def show(result: dict) -> None:
    rows = result["rows"]
    names = list(dict.fromkeys(row["method"] for row in rows))
    print("cosine and norm ratio against the float64 mean\n")
    print(f"{'dtype':<10}{'std':<8}" + "".join(f"{name:>24}" for name in names))
    for dtype in DTYPES:
        for std in STDS:
            cells = {row["method"]: cell(row) for row in rows if (row["dtype"], row["std"]) == (dtype, std)}
            print(f"{dtype:<10}{std:<8g}" + "".join(f"{cells[name]:>24}" for name in names))
    if IN_TREE not in names:
        print(f"\n{IN_TREE}: {'needs a GPU for each rank' if torch.cuda.is_available() else NO_IN_TREE}")
    print(f"\n{'between nodes':<20}{'feedback':<12}{'added up':<12}{'':>13}")
    for row in result["sums"]:
        feedback = "yes" if row["error_feedback"] else "no"
        print(f"{row['between nodes']:<20}{feedback:<12}{row['added']:<12}{cell(row)}")
    print(f"\n{'':<24}{'dtype':<10}{'micro-batches':>14}  {'added up':<14}")
    for row in result["micro_batches"]:
        print(f"{row['method']:<24}{row['dtype']:<10}{row['micro_batches']:>14}  {row['added']:<14}{cell(row)}")


def cell(row: dict) -> str:
    cosine, ratio = row["cosine"], row["norm_ratio"]
    return "nan" if cosine is None or ratio is None else f"{cosine:.6f} {ratio:>10.5g}"


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(argparse.Namespace(**json.loads(sys.argv[2])))
        return
    args = parse()
    shape = [int(size) for size in args.shape.split("x")]
    counts = [int(count) for count in args.micro_batches.split(",")]
    job = json.dumps({**vars(args), "shape": shape, "micro_batches": counts})
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        launch(
            "benchmarks.gradient_fidelity",
            ["--worker", job],
            RANKS,
            store,
            args.timeout,
            nodes=RANKS // PER_NODE,
            namespaces=False,
            gpus=torch.cuda.device_count(),
        )
        found = json.loads(Path(f"{store}.rows").read_text())
    head = describe("gradient_fidelity")
    result = {**head, "shape": shape, "block_size": args.block_size, "ranks": f"2 nodes x {PER_NODE}", **found}
    write_result(args.out, result | {"finished": True})
    show(result)


if __name__ == "__main__":
    main()
