"""The frozen store in training: what it computes, what it sends, what it holds."""

import frozen_jobs as jobs
import pytest
import torch
from ranks import run_ranks, run_two
from thinning import thinned

FORMATS = {
    "int8": jobs.frozen("int8"),
    "int4": jobs.frozen("int4"),
    "nf4, double": jobs.frozen("nf4", block_size=64, double_quantize=True),
    "mxfp4": jobs.frozen("mxfp4"),
    "fp8, one scale": jobs.frozen("fp8_e4m3", scales="tensor"),
}


@pytest.mark.parametrize("name, zero_init", thinned(FORMATS, [False, True]))
def test_training_equals_training_on_rounded_weights(name, zero_init):
    """Bit for bit: losses, adapters, and what anybody sees of the frozen weights."""
    for stored, rounded in run_two(jobs.equals_rounded_weights, fields=FORMATS[name], zero_init=zero_init):
        assert stored["losses"] == rounded["losses"]
        assert len(stored["stored"]) == 14 and all("_proj" in name for name in stored["stored"])
        assert all(torch.equal(stored["weights"][n], rounded["weights"][n]) for n in rounded["weights"])
        assert all(torch.equal(stored["fp32"][n], rounded["fp32"][n]) for n in rounded["fp32"])


@pytest.mark.parametrize(
    "world, ranks_per_node, dtype, scope",
    [
        (1, 1, "bf16", "none"),
        (1, 1, "fp32", "rank"),
        (2, 1, "bf16", "rank"),
        (3, 3, "fp32", "node"),
        (6, 2, "bf16", "none"),
        (6, 2, "fp32", "node"),
    ],
)
def test_on_any_number_of_ranks(world, ranks_per_node, dtype, scope):
    more = {"secondary": {"scope": scope}, "topology": {"ranks_per_node": ranks_per_node}}
    for stored, rounded in run_ranks(
        jobs.equals_rounded_weights,
        world=world,
        ranks_per_node=ranks_per_node,
        fields=FORMATS["int4"],
        dtype=dtype,
        **more,
    ):
        assert stored["losses"] == rounded["losses"] and len(stored["stored"]) == 14
        assert all(torch.equal(stored["fp32"][n], rounded["fp32"][n]) for n in rounded["fp32"])


CURRENT, DELAYED = {"format": "fp8", "scaling": "current"}, {"format": "fp8"}


@pytest.mark.parametrize(
    "fields, world, ranks_per_node, compute, more",
    [
        (FORMATS["int4"], 4, 2, CURRENT, {}),
        (FORMATS["nf4, double"], 3, 3, CURRENT, {}),
        (FORMATS["nf4, double"], 1, 1, CURRENT, {}),
        (FORMATS["int4"], 2, 1, DELAYED, {"secondary": {"scope": "node"}}),
    ],
    ids=["int4", "nf4, double", "one rank", "delayed"],
)
def test_fp8_compute_casts_what_codes_decode_to(fields, world, ranks_per_node, compute, more):
    """Bit for bit what a layer computes whose weight was rounded beforehand."""
    more = {"compute": compute, "topology": {"ranks_per_node": ranks_per_node}, **more}
    for stored, rounded in run_ranks(
        jobs.equals_rounded_weights, world=world, ranks_per_node=ranks_per_node, fields=fields, dtype="bf16", **more
    ):
        assert stored["operands"] == rounded["operands"] == 0 and len(stored["stored"]) == 14
        assert stored["losses"] == rounded["losses"]
        assert all(torch.equal(stored["weights"][n], rounded["weights"][n]) for n in rounded["weights"])
        assert all(torch.equal(stored["fp32"][n], rounded["fp32"][n]) for n in rounded["fp32"])


def test_fp8_compute_under_zero_init():
    """Which makes the adapters in bf16."""
    more = {"compute": DELAYED, "secondary": {"scope": "node"}}
    for stored, rounded in run_two(
        jobs.equals_rounded_weights, fields=FORMATS["int4"], dtype="bf16", zero_init=True, **more
    ):
        assert stored["operands"] == 0 and stored["losses"] == pytest.approx(rounded["losses"], rel=2e-3)


@pytest.mark.parametrize("world, ranks_per_node, scope", [(1, 1, "none"), (3, 3, "none"), (4, 2, "node")])
def test_fp8_with_one_scale_is_the_operand_itself(world, ranks_per_node, scope):
    """Bit for bit what a layer computes that casts its 16-bit weight, which is never stored."""
    more = {"topology": {"ranks_per_node": ranks_per_node}, "secondary": {"scope": scope}}
    for stored, cast in run_ranks(jobs.equals_a_cast, world=world, ranks_per_node=ranks_per_node, **more):
        assert stored["operands"] == 8 == len(stored["stored"]) and cast["operands"] == 0
        assert stored["losses"] == cast["losses"]
        assert all(torch.equal(stored["fp32"][n], cast["fp32"][n]) for n in cast["fp32"])
        changed = {n for n, weight in cast["weights"].items() if not torch.equal(stored["weights"][n], weight)}
        assert changed == set(stored["stored"])  # those are rounded, for who reads them


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "int8"},
        {"name": "nf4", "double_quantize": True},
        {"name": "mxfp6_e2m3"},
        {"name": "fp8_e4m3", "scales": "tensor"},
    ],
    ids=lambda fields: fields["name"],
)
def test_codes_do_not_depend_on_the_number_of_ranks(fields):
    seen = []
    for world in (1, 3, 4):
        for weights, full, wire_format in run_ranks(
            jobs.same_codes_on_any_number_of_ranks,
            world=world,
            ranks_per_node=1,
            **fields,
        ):
            for key, weight in weights.items():
                if weight.dim() == 2:
                    whole = wire_format.decode(wire_format.encode(weight), weight.shape, torch.float32)
                    assert torch.equal(full[key], whole), (world, key)
            seen.append(full)
    assert all(torch.equal(a[key], seen[0][key]) for a in seen for key in seen[0])


@pytest.mark.parametrize("scope", ["none", "node", "rank"])
def test_codes_travel_once_where_copies_stay(scope):
    """With a secondary shard nothing of the store crosses its links again after the first step."""
    for log in run_ranks(jobs.traffic, scope=scope, name="int4"):
        first, *later = log["steps"]
        assert log["one storage a unit"] and log["units"] == 2
        # int4, 16 elements per block, two bytes per scale: 0.625 bytes; padding of small tensors on top
        assert 0.625 <= 4 * log["at rest"] / log["numel"] < 0.66
        assert later[0] == later[1]
        assert log["rests in the copy"] and log["own again"]
        if scope == "none":
            assert first == later[0] and log["held"] == 0
        else:
            assert log["held"] == log["at rest"] * (2 if scope == "node" else 4)
            assert first["inter"] - later[0]["inter"] == log["all frozen"] > log["at rest"]
            assert first["intra"] - later[0]["intra"] == (0 if scope == "node" else 2 * log["all frozen"])
