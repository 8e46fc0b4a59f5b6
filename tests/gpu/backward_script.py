"""The programs of tests/system/backward_jobs.py on GPUs, as a job of its own: writes what each gave as JSON."""

import itertools
import json
import os
import sys

import torch
import torch.distributed as dist


def main(path: str) -> None:
    import deepspeed

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("nccl")
    from backward_jobs import odd_ones, run_programs, tiled
    from test_backwards import EXACT, ROUNDED, cases

    found = {}
    for ranks_per_node in (1, dist.get_world_size()):
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
        for name, kinds in (("exact", EXACT), ("rounded", ROUNDED)):
            these = cases(itertools.product(kinds, range(3)))
            found[f"{name}, {ranks_per_node} a node"] = list(zip(map(str, these), run_programs(these)))
        found[f"odd, {ranks_per_node} a node"] = list(odd_ones("lossless").items())
        found[f"odd zeropp, {ranks_per_node} a node"] = list(odd_ones("zeropp").items())
        found[f"tiled, {ranks_per_node} a node"] = [["lossless", tiled("lossless")], ["zeropp", tiled("zeropp")]]
        if dist.get_rank() == 0:
            with open(path, "w") as f:
                json.dump(found, f, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
