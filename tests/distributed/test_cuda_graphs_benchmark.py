"""benchmarks/cuda_graphs.py: the fetch that it times is a fetch, and what it makes of its times."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_two

from benchmarks.cuda_graphs import Layer, compare
from zeropp_fp8.comm.topology import INTRA, Level
from zeropp_fp8.formats import make_format


def fetched():
    """(this rank's slices, all values)."""
    torch.manual_seed(dist.get_rank())
    level = Level(dist.group.WORLD, dist.get_world_size(), INTRA)
    layer = Layer([torch.Size([33, 7]), torch.Size([5])], level, torch.device("cpu"))
    values = layer.values()
    layer.fetch(layer.codes(), values)
    return layer.slices, values


def test_a_fetch_gives_all_ranks_slices():
    ranks, int8 = run_two(fetched), make_format("int8", block_size=256)
    for i in range(2):
        slices = [own[i].float() for own, _ in ranks]
        expected = torch.cat([int8.decode(int8.encode(own), own.shape, torch.bfloat16) for own in slices])
        assert not torch.equal(slices[0], slices[1])
        for _, values in ranks:
            torch.testing.assert_close(values[i], expected, rtol=0, atol=0)


def test_what_a_graph_saves():
    rows = [
        {"run": run, "host_ms": host, "ms": 9.0, "mb": 1.0}
        for run, hosts in (("fetch", (4, 6)), ("fetch-graph", (1, 1)), ("optimizer", (2, 2)))
        for host in hosts
    ]
    by_run = {line["run"]: line for line in compare(rows)}
    assert by_run["fetch-graph"]["saves_host_ms"] == pytest.approx(4)
    assert "saves_host_ms" not in by_run["fetch"] and "saves_host_ms" not in by_run["optimizer"]
