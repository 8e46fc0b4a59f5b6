"""How close a reduced gradient is to the true mean: cosine and ratio of norms, by dtype and gradient size.

    python -m benchmarks.gradient_fidelity --out gradient_fidelity.json
    python -m benchmarks.gradient_fidelity --micro-batches 1,8,16

4 ranks as 2 nodes x 2 reduce random gradients; each row compares the joined slices with the float64 mean. CPU with gloo
or GPUs with NCCL (with fewer than 4 ranks share them, and DeepSpeed's own is left out); no namespaces, no root. What is
compared:

    stock           reduce-scatter in the gradient's own dtype, divided by the ranks first, as ZeRO-3 does
    in-tree qgZ     DeepSpeed's all_to_all_quant_reduce, INT4 on both hops; GPUs only
    INT8 / INT8...  this project: the format in the node / between nodes

Gradients of several --micro-batches are added up and compared with their sum's mean: by this project alone, once with
each reduced to the end and once added up inside the node and sent between nodes once (", added in the node").

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
IN_NODE = ", added in the node"
IN_TREE = "in-tree qgZ"
# name: (format in the node, format between nodes, Hadamard rotation in the node, between nodes)
OURS = {
    "INT8 / INT8": ("int8", "int8", False, False),
    "INT8 / INT4 hadamard": ("int8", "int4", False, True),
    "INT4 / INT4 hadamard": ("int4", "int4", True, True),
}
DTYPES = ("float32", "bfloat16", "float16")
STDS = (1.0, 1e-2, 1e-4)


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", default="1024x1024", help="of the gradient; in-tree qgZ needs whole groups, so a power of two"
    )
    parser.add_argument("--micro-batches", type=several(whole(1)), default="1", help="separated by commas (default 1)")
    parser.add_argument("--block-size", type=whole(1), default=128, help="elements that share a scale")
    parser.add_argument("--timeout", type=finite(above=0), default=300, help="seconds for everything")
    parser.add_argument("--out", type=new_file, default="runs/gradient_fidelity.json")
    return parser.parse_args(argv)


def stock(grads, topology, args):
    """ZeRO-3's reduce_scatter_coalesced for one tensor."""
    import torch.distributed as dist
    import torch.nn.functional as F

    (grad,) = grads
    size = -(-grad.numel() // RANKS)
    flat = F.pad(grad.view(-1) / RANKS, (0, size * RANKS - grad.numel()))
    mine = flat.new_empty(size)
    dist.reduce_scatter_tensor(mine, flat)
    return mine


def in_tree(grads, topology, args):
    from deepspeed.runtime.comm.coalesced_collectives import all_to_all_quant_reduce

    return all_to_all_quant_reduce([grads[0].clone()], args.groups)[0]


def ours(name: str):
    """The reduction of several micro-batches' gradients to their sum, in fp32."""

    def reduce(grads, topology, args):
        from zeropp_fp8.comm.lanes import Lane
        from zeropp_fp8.comm.reduce_scatter import ReduceScatterPlan, Reduction, Rings
        from zeropp_fp8.formats import make_format

        intra, inter, *hadamard = OURS[name.removesuffix(IN_NODE)]
        formats = (
            make_format(kind, block_size=args.block_size, hadamard=rotate)
            for kind, rotate in zip((intra, inter), hadamard)
        )
        device, here = grads[0].device, Lane.here()
        plan = ReduceScatterPlan([grads[0].shape], [grads[0].dtype], topology, *formats, device)
        result = torch.zeros(plan.slice_numels[0], device=device)
        reduction, sums = Reduction(Rings.on(device), here, here), plan.new_sums(torch.float32)
        for index, grad in enumerate(grads):
            added = index > 0
            if name.endswith(IN_NODE):
                hops = plan.sum_in_node([grad], sums, reduction, accumulate=added)
            else:
                hops = plan.run([grad], [result], reduction, accumulate=added)
            for _ in hops:
                pass
        if name.endswith(IN_NODE):
            for _ in plan.spread(sums, [result], reduction, accumulate=False):
                pass
        return result

    return reduce


def compare(reduce, grads, exact, topology, args) -> dict:
    """Join the slices that `reduce` leaves on the ranks, and compare with the exact mean."""
    import torch.distributed as dist

    mine = reduce(grads, topology, args).float().contiguous()
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
    alone = {"stock": stock}
    if on_gpu and torch.cuda.device_count() == PER_NODE:  # a GPU for each rank
        from deepspeed.utils import groups

        build_in_tree_op()
        args.groups = groups._get_local_all_to_all_group()
        alone[IN_TREE] = in_tree
    several = {name: ours(name) for of in OURS for name in (of, of + IN_NODE)}
    rows = []
    for dtype in DTYPES:
        generator = torch.Generator(device=device).manual_seed(dist.get_rank())
        for std, count in itertools.product(STDS, args.micro_batches):
            grads, exact = [], 0.0
            for _ in range(count):
                grad = torch.randn(args.shape, generator=generator, device=device).mul_(std).to(getattr(torch, dtype))
                everyone = [torch.empty_like(grad) for _ in range(RANKS)]
                dist.all_gather(everyone, grad)
                grads.append(grad)
                exact = exact + torch.stack([g.double() for g in everyone]).mean(0).view(-1)
            methods = several if count > 1 else alone | {name: several[name] for name in OURS}
            for name, reduce in methods.items():
                row = {"dtype": dtype, "std": std, "method": name, "micro_batches": count}
                rows.append(row | compare(reduce, grads, exact, topology, args))
    if dist.get_rank() == 0:
        Path(os.environ["STORE_FILE"] + ".rows").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def show(rows: list[dict]) -> None:
    print("cosine and norm ratio against the float64 mean")
    for count in dict.fromkeys(row["micro_batches"] for row in rows):
        of_count = [row for row in rows if row["micro_batches"] == count]
        names = list(dict.fromkeys(row["method"] for row in of_count))
        print(f"\n{count} micro-batch(es)\n{'dtype':<10}{'std':<8}" + "".join(f"{name:>42}" for name in names))
        for dtype, std in itertools.product(DTYPES, STDS):
            cells = {row["method"]: cell(row) for row in of_count if (row["dtype"], row["std"]) == (dtype, std)}
            print(f"{dtype:<10}{std:<8g}" + "".join(f"{cells[name]:>42}" for name in names))
        if count == 1 and IN_TREE not in names:
            print(f"\n{IN_TREE}: {NO_IN_TREE if not torch.cuda.is_available() else 'needs a GPU for each rank'}")


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
        rows = json.loads(Path(f"{store}.rows").read_text())
    head = describe("gradient_fidelity")
    result = {**head, "shape": shape, "block_size": args.block_size, "ranks": f"2 nodes x {PER_NODE}", "rows": rows}
    write_result(args.out, result | {"finished": True})
    show(rows)


if __name__ == "__main__":
    main()
