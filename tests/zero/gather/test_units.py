"""Cutting a model into units: of gathers, and of reductions."""

import math
from types import SimpleNamespace

import torch
from fake_units import SLICED, as_block, fake_parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zeropp_fp8.zero.gather.buffers import Places, Regions
from zeropp_fp8.zero.gather.sliced import Sliced
from zeropp_fp8.zero.gather.units import build_units
from zeropp_fp8.zero.reduce.order import reduction_units

CPU = torch.device("cpu")
PLENTY = 10**9


# -- units of a gather


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)


class Net(nn.Module):
    """Two blocks between an embedding and a head that share one parameter, and a parameter of the model's own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight


def zero3_net(persistent=()):
    """A Net whose parameters carry what ZeRO-3 puts on them."""
    net = Net()
    for index, (name, param) in enumerate(net.named_parameters()):
        param.ds_id, param.ds_numel = index, param.numel()
        param.ds_persist = name in persistent
    return net


def named_units(net, units):
    names = {id(p): name for name, p in net.named_parameters()}
    return [[names[id(p)] for p in unit.params] for unit in units]


def of_block(index):
    return [f"blocks.{index}.{name}" for name in ("fc.weight", "fc.bias", "norm.weight", "norm.bias")]


def test_units_of_blocks():
    net = zero3_net()
    units = build_units(net, list(net.blocks), "block", [SLICED])
    tied_to_the_first = [["scale"], ["embed.weight"], of_block(0), of_block(1)]
    assert named_units(net, units) == [*tied_to_the_first, ["norm.weight", "norm.bias"], ["head.bias"]]
    assert [unit.numel for unit in units] == [1, 24, 28, 28, 8, 6]
    assert not any(unit.persistent or unit.live or unit.is_pending for unit in units)


def test_units_of_modules_and_of_parameters():
    net = zero3_net()
    modules = [name for index in range(2) for name in (of_block(index)[:2], of_block(index)[2:])]
    outside = [["scale"], ["embed.weight"]], [["norm.weight", "norm.bias"], ["head.bias"]]
    assert named_units(net, build_units(net, [], "module", [SLICED])) == [*outside[0], *modules, *outside[1]]
    each = [[name] for name, _ in net.named_parameters()]
    assert named_units(net, build_units(net, [], "parameter", [SLICED])) == each


class Narrow(Sliced):
    """A kind for vectors."""

    def takes(self, param):
        return param.dim() < 2


def test_parameters_of_two_kinds_never_share_a_unit():
    """Frozen and trained ones neither, whatever their kind; the first kind that takes a parameter has it."""
    net, narrow = zero3_net(), Narrow(SimpleNamespace())
    net.blocks[1].fc.weight.requires_grad_(False)
    net.blocks[1].norm.bias.requires_grad_(False)
    units = build_units(net, list(net.blocks), "block", [narrow, SLICED])
    first, second = of_block(0), of_block(1)
    assert named_units(net, units) == [
        ["scale"],
        ["embed.weight"],
        first[1:],
        first[:1],
        [second[3]],
        [second[1], second[2]],
        [second[0]],
        ["norm.weight", "norm.bias"],
        ["head.bias"],
    ]
    assert [unit.storage is narrow for unit in units] == [True, False, True, False, True, True, False, True, True]
    each = build_units(net, [], "parameter", [narrow, SLICED])
    assert all((unit.storage is narrow) == (unit.params[0].dim() < 2) for unit in each)


def test_persistent_parameters_are_one_unit():
    """Of each kind, and of frozen and trained ones apart."""
    small = [name for name, p in Net().named_parameters() if p.dim() < 2]
    net = zero3_net(persistent=small)
    first, *others = build_units(net, list(net.blocks), "block", [SLICED])
    assert first.persistent and named_units(net, [first]) == [small]
    assert not any(unit.persistent for unit in others)
    assert named_units(net, others) == [["embed.weight"], ["blocks.0.fc.weight"], ["blocks.1.fc.weight"]]
    net = zero3_net(persistent=[name for name, _ in net.named_parameters()])
    assert len(build_units(net, [], "parameter", [SLICED])) == 1
    net.embed.requires_grad_(False)
    net.norm.requires_grad_(False)
    frozen = ["embed.weight", "norm.weight", "norm.bias"]
    vectors, matrices = ([n for n, p in net.named_parameters() if (p.dim() < 2) is small] for small in (True, False))
    units = build_units(net, list(net.blocks), "block", [Narrow(SimpleNamespace()), SLICED])
    assert all(unit.persistent for unit in units)
    assert named_units(net, units) == [
        [name for name in names if (name in frozen) is is_frozen]
        for names in (vectors, matrices)
        for is_frozen in (True, False)
    ]


def test_a_leaf_module_is_one_unit():
    net = zero3_net()
    net.blocks[1]._z3_leaf = True
    assert named_units(net, build_units(net, [], "module", [SLICED]))[-3:] == [
        of_block(1),
        ["norm.weight", "norm.bias"],
        ["head.bias"],
    ]
    net._z3_leaf = True
    assert named_units(net, build_units(net, [], "module", [SLICED])) == [[name for name, _ in net.named_parameters()]]


def test_a_block_that_shares_a_parameter_leaves_it_to_the_first():
    net = zero3_net()
    net.blocks[1].fc.weight = net.blocks[0].fc.weight
    units = named_units(net, build_units(net, list(net.blocks), "block", [SLICED]))
    assert units[2] == of_block(0) and units[3] == of_block(1)[1:]


def test_decoded_parameters_lie_in_one_aligned_buffer():
    shapes = [(5,), (3, 3), (0,), (4, 2, 2), (3, 1)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    params = [SimpleNamespace(ds_numel=math.prod(shape), ds_shape=shape) for shape in shapes]
    places = Places(params, dtypes)
    for _ in range(2):
        tensors = places.empty(CPU)
        assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == list(zip(shapes, dtypes))
        for dtype in set(dtypes):
            of_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
            starts = [tensor.storage_offset() * dtype.itemsize for tensor in of_dtype]
            ends = [start + tensor.numel() * dtype.itemsize for start, tensor in zip(starts, of_dtype)]
            assert len({tensor.untyped_storage().data_ptr() for tensor in of_dtype}) == 1
            assert all(start % 16 == 0 for start in starts)
            assert all(end <= following for end, following in zip(ends, starts[1:]))
            assert ends[-1] <= of_dtype[0].untyped_storage().nbytes() <= ends[-1] + 15


def test_what_is_left_out_has_no_place():
    params = [SimpleNamespace(ds_numel=3, ds_shape=(3,)) for _ in range(3)]
    first, second, third = Places(params, [torch.float32] * 3, left_out=[1]).empty(CPU)
    assert second is None and third.storage_offset() == 4 and first.untyped_storage().nbytes() == 32


class Anything:
    """A parameter that can be a key."""

    def __init__(self, numel):
        self.ds_numel = numel


def test_regions_hold_each_operand_in_one_piece():
    regions = Regions([0, 5, 32, 3])
    assert regions.places == [(0, 0), (0, 5), (16, 32), (48, 3)] and regions.rank_bytes == 64
    ranks = 3
    buffer = torch.arange(ranks * regions.rank_bytes, dtype=torch.uint8)
    for (start, size), region in zip(regions.places, regions.all_of(buffer, ranks), strict=True):
        assert region.shape == (ranks, size) and region.is_contiguous()
        if size:
            assert region[0, 0] == start * ranks and region.view(-1)[-1] == (start + size) * ranks - 1


# -- units of a reduction


def positions(units, params):
    place = {id(p): index for index, p in enumerate(params)}
    return [[place[id(p)] for p in unit] for unit in units]


def test_reduction_runs_from_the_last_to_the_first():
    params = fake_parameters([10, 5, 5, 5, 5, 8, 9])
    blocks = [as_block(params[1:3]), as_block(params[3:5])]
    assert positions(reduction_units(params, params, blocks), params) == [[6], [5], [3, 4], [1, 2], [0]]


def test_neighbours_outside_blocks_are_joined_up_to_the_limit():
    params = fake_parameters([3, 4, 5, 50, 50, 6, 7, 8])
    blocks = [as_block(params[3:4]), as_block(params[4:5])]

    def joined(numel):
        return positions(reduction_units(params, params, blocks, numel), params)

    assert joined(21) == [[7, 6, 5], [4], [3], [2, 1, 0]]
    assert joined(15) == [[7, 6], [5], [4], [3], [2, 1, 0]]
    assert joined(14) == [[7], [6, 5], [4], [3], [2, 1, 0]]
    assert joined(9) == [[7], [6], [5], [4], [3], [2, 1], [0]]
    assert joined(PLENTY) == joined(21), "blocks are never joined, not with each other nor with what is outside"


def test_vectors_of_blocks_travel_together_at_the_end():
    """Only where units are joined at all; those outside blocks are neighbours like any other."""
    params = fake_parameters([10, 5, 1, 5, 2, 3, 8], vectors=(2, 4, 5))
    blocks = [as_block(params[1:3]), as_block(params[3:5])]

    def joined(numel):
        return positions(reduction_units(params, params, blocks, numel), params)

    assert joined(0) == [[6], [5], [3, 4], [1, 2], [0]]
    assert joined(12) == [[6, 5], [3], [1], [0], [2, 4]]
    assert joined(13) == [[6, 5], [3], [1], [0, 2, 4]], "with what comes last, as far as it fits"


def test_a_block_cut_by_the_optimizers_groups_stays_whole():
    params = fake_parameters([4, 4, 1, 1])  # matrices of both blocks, then their biases
    blocks = [as_block([params[0], params[2]]), as_block([params[1], params[3]])]
    assert positions(reduction_units(params, params, blocks), params) == [[1, 3], [0, 2]]


def test_units_follow_the_model_not_the_optimizer():
    """An embedding and its norm, two blocks, a head: those outside blocks come when backward has come to them."""
    params = fake_parameters([8, 1, 4, 1, 4, 1, 9])
    blocks = [as_block(params[2:4]), as_block(params[4:6])]
    cut = [params[i] for i in (0, 2, 4, 6, 1, 3, 5)]  # matrices, then vectors
    assert positions(reduction_units(cut, params, blocks), params) == [[6], [4, 5], [2, 3], [1], [0]]
    assert positions(reduction_units(params[::-1], params, blocks), params) == [[6], [5, 4], [3, 2], [1], [0]]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.sampled_from([None, None, 0, 1, 2])), max_size=12),
    st.integers(0, 50),
)
def test_reduction_units_are_a_greedy_partition(described, limit):
    params = fake_parameters([numel for numel, _ in described])
    members = {b: [i for i, (_, block) in enumerate(described) if block == b] for b in range(3)}
    units = positions(
        reduction_units(params, params, [as_block([params[i] for i in members[b]]) for b in members], limit), params
    )
    assert sorted(i for unit in units for i in unit) == list(range(len(params)))
    for before, unit in zip([None, *units], units):
        block = described[unit[0]][1]
        if block is not None:
            assert unit == members[block]
            continue
        assert all(described[i][1] is None for i in unit) and unit == sorted(unit, reverse=True)
        numels = [described[i][0] for i in unit]
        assert len(unit) == 1 or sum(numels) <= limit
        if before is not None and described[before[0]][1] is None:
            assert sum(described[i][0] for i in before) + numels[0] > limit, "one more would have fitted"
