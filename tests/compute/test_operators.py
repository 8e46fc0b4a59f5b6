"""Low-precision layers in graphs of torch.compile: the operators keep torch's contract, and give eager code's bits."""

import collections
import copy
import functools
import itertools
from types import MethodType

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from models import compiled_by, llama
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from transformers.pytorch_utils import Conv1D

from zeropp_fp8 import sharded
from zeropp_fp8.compute import casts, convert_linear_layers, operators, restore_linear_layers
from zeropp_fp8.compute.scaling import ROLES

SCALINGS = {
    "delayed": {"format": "fp8", "scaling": "delayed"},
    "current": {"format": "fp8", "scaling": "current"},
    "hybrid": {"format": "fp8_hybrid", "scaling": "current"},
    "per_channel": {"format": "fp8", "scaling": "per_channel"},
    "block": {"format": "fp8", "scaling": "block"},
    "mx": {"format": "mxfp8_e4m3"},
    "gradients in high precision": {
        "format": {"weights": "mxfp8_e4m3", "activations": "mxfp6_e2m3", "gradients": "none"}
    },
}
WIDTH = 128
STEPS = 3


class Block(nn.Module):
    """As a decoder layer: three layers with one input, one with another."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.o_proj(self.q_proj(y) * torch.sigmoid(self.k_proj(y)) + self.v_proj(y))


def blocks(scaling, dtype=torch.float32, count=3, **fields):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(count))).to(dtype)
    return model, convert_linear_layers(model, SCALINGS[scaling] | fields).scaling


def compiled(model):
    """One graph for all blocks."""
    torch._dynamo.reset()
    counters.clear()
    forward = torch.compile(Block.forward)
    for block in model:
        block.forward = MethodType(forward, block)
    return model


def trained(model, scaling, frozen=(), autocast=False):
    """Losses, gradients, and what the scales remember."""
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in frozen))
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(3, 7, WIDTH).to(model[0].norm.weight.dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()
        found += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param.sub_(0.1 * param.grad)
        model.zero_grad()
        scaling.end_step()
    with torch.no_grad():
        found.append(model(torch.ones(5, WIDTH, dtype=x.dtype)))
    return found, scaling.state_dict()


def assert_same(one, other):
    assert_same_numbers(one, other)
    assert one[1].keys() == other[1].keys()
    for key, value in one[1].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[1][key])), key


def assert_same_numbers(one, other):
    assert len(one[0]) == len(other[0])
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0]))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_eager_code(scaling, dtype):
    """Histories too: layers that share an input record it once, in both."""
    with compiled_by("aot_eager"):
        expected = trained(*blocks(scaling, dtype))
        model, scales = blocks(scaling, dtype)
        found = trained(compiled(model), scales)
    assert_same(expected, found)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"], "training, and evaluation"


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("q_proj", "o_proj.weight"), ("0.",)], ids=str)
def test_what_is_frozen(frozen):
    """Where q is frozen and k is not, k casts by itself in eager code and records it; so do all under autocast."""
    for scaling in ("delayed", "mx", "gradients in high precision"):
        with compiled_by("aot_eager"):
            expected = trained(*blocks(scaling), frozen)
            model, scales = blocks(scaling)
            assert_same_numbers(expected, trained(compiled(model), scales, frozen))


# In each layer of a block others; the last block has one more, so that it needs a graph of its own.
MIXED = {
    "output": ["q_proj", "2.o_proj"],
    "grad_input": ["k_proj", "o_proj", "up_proj"],
    "grad_weight": ["q_proj", "v_proj", "gate_proj", "down_proj"],
}


@pytest.mark.parametrize("scaling", ["delayed", "current", "block", "mx"])
def test_gemms_in_high_precision(scaling):
    with compiled_by("aot_eager"):
        expected = trained(*blocks(scaling, high_precision_gemms=MIXED))
        model, scales = blocks(scaling, high_precision_gemms=MIXED)
        assert_same_numbers(expected, trained(compiled(model), scales))
    assert not counters["graph_break"]


def test_under_autocast():
    with compiled_by("aot_eager"):
        expected = trained(*blocks("delayed"), autocast=True)
        model, scales = blocks("delayed")
        assert_same_numbers(expected, trained(compiled(model), scales, autocast=True))


def test_a_copy_has_weights_and_scales_of_its_own():
    with compiled_by("aot_eager"):
        model, _ = blocks("delayed")
        copied = copy.deepcopy(model)
        scales = copied[0].q_proj.precision.scaling
        expected = trained(*blocks("delayed"))
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(torch.nan)
        assert_same(expected, trained(compiled(copied), scales))
    assert {int(m.number) for m in model.modules() if hasattr(m, "number")}.isdisjoint(
        int(m.number) for m in copied.modules() if hasattr(m, "number")
    )
    assert copied[1].k_proj.casts_input == (copied[1].q_proj,)


def test_layers_are_let_go_of():
    model, _ = blocks("current", count=1)
    numbers = [int(layer.number) for layer in (model[0].q_proj, model[0].v_proj)]
    assert all(number in operators._layers for number in numbers)
    restore_linear_layers(model)
    assert not {"number", "kind", "casts_input", "precision"} & model[0].q_proj.__dict__.keys()
    del model
    assert not any(number in operators._layers for number in numbers)


def check_contract(operator, arguments, tables):
    """Shapes, strides and dtypes as promised; nothing that is returned lies where anything else does."""
    torch.library.opcheck(operator, arguments, test_utils=("test_autograd_registration", "test_faketensor"))
    results = operator(*arguments)
    given = [t for t in (*arguments, *tables) if isinstance(t, torch.Tensor)]
    new, old = ([t.untyped_storage().data_ptr() for t in tensors if t.numel()] for tensors in (results, given))
    assert len(set(new)) == len(new) and not set(new) & set(old)
    return results


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("rows", [1, 16, 19, 130])
def test_the_contract_of_torch(scaling, rows):
    """Of casts of each operand, in each form, with a scale from before and without."""
    for dtype, training in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        model, scales = blocks(scaling, dtype, count=1)
        layer = model[0].q_proj
        high = layer.precision.high
        for _ in range(2):  # the second time delayed scaling has a table
            tables = [t for t in (getattr(scales, "_scale", None),) if t is not None]
            for role, forms in itertools.product(ROLES, ((True, False), (False, True), (True, True))):
                if role == "gradients" and high.grad_input and high.grad_weight:
                    continue
                matrix = torch.randn(rows, WIDTH).to(dtype)
                arguments = (layer.number, role, layer.kind, *forms, training)
                cast = torch.ops.zeropp_fp8.cast.default
                parts = check_contract(cast, (matrix, None, *arguments), tables)
                assert len(parts) == sum(forms) * (1 + (scales.granularity not in ("tensor", "rounded"))) + (
                    scales.granularity == "tensor"
                )
                if scales.granularity == "tensor":
                    again = check_contract(cast, (matrix, parts[-1], *arguments), tables)
                    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(parts, again))
            scales.end_step()


@pytest.mark.parametrize("scaling", ["delayed", "current", "per_channel", "block"])
@pytest.mark.parametrize("conv1d", [False, True], ids=["linear", "conv1d"])
def test_a_weight_that_is_there_as_codes(scaling, conv1d):
    """A graph multiplies codes as eager code does, and backward those that have been gathered for it meanwhile."""
    granularity = {"per_channel": "row", "block": "tile"}.get(scaling, "tensor")
    if conv1d and granularity == "row":
        pytest.skip("[in, out] has scales per column")
    results = []
    for in_a_graph in (False, True):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        layer = Conv1D(WIDTH, WIDTH) if conv1d else nn.Linear(WIDTH, WIDTH)
        model = nn.Sequential(nn.LayerNorm(WIDTH), layer)
        report = convert_linear_layers(model, SCALINGS[scaling])
        run = torch.compile(model, backend="aot_eager") if in_a_graph else model
        sharded.remember(layer.weight, wire="an engine's")
        cast = functools.partial(casts.cast_per_tensor, dtype=torch.float8_e4m3fn)
        if granularity != "tensor":
            cast = functools.partial(casts.cast_groups, granularity, dtype=torch.float8_e4m3fn)
        for _ in range(STEPS):
            values = torch.randn(WIDTH, WIDTH)
            x = torch.randn(5, WIDTH, requires_grad=True)
            sharded.set_operand(layer.weight, cast(values)[0])
            y = run(x)
            sharded.drop_operand(layer.weight)
            assert sharded.known(layer.weight).in_graphs[0].numel() == 0
            sharded.set_operand(layer.weight, cast(-values)[0])  # the values of backward
            y.square().sum().backward()
            sharded.drop_operand(layer.weight)
            report.scaling.end_step()
            results.append([y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())])
            model.zero_grad()
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    for one, other in zip(results, results[STEPS:], strict=False):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- norms and SwiGLU --------------------------------------------------------------------------------------------------


def llama_of(in_graphs):
    """A Llama with delayed scaling; `in_graphs`: compiled layers, which share one graph."""
    model = llama(hidden=64, intermediate=128).bfloat16()
    report = convert_linear_layers(model, SCALINGS["delayed"])
    assert len(report.fused) == 6
    if in_graphs:
        torch._dynamo.reset()
        counters.clear()
        forward = torch.compile(type(model.model.layers[0]).forward)
        for layer in model.model.layers:
            layer.forward = MethodType(forward, layer)
    return model, report.scaling


def llama_trained(model, scaling):
    """As `trained`."""
    found = []
    for step in range(STEPS):
        tokens = torch.randint(0, 256, (2, 19), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        scaling.end_step()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.eval()
    with torch.no_grad():
        found.append(model(input_ids=tokens).logits)
    return found, scaling.state_dict()


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_fused_modules_in_a_graph(reentrant):
    """As they were written, as eager code has them without a GPU."""
    with compiled_by("aot_eager"):
        found = []
        for in_graphs in (False, True):
            model, scaling = llama_of(in_graphs)
            if reentrant is not None:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.enable_input_require_grads()
            found.append(llama_trained(model, scaling))
    assert_same(*found)
    # with checkpointing, forward of the first run has no gradients or saves for another one
    assert counters["stats"]["unique_graphs"] <= 3 and not counters["graph_break"]


def test_layers_that_share_an_input_cast_it_once():
    """Also in graphs, in forward and not again in backward."""
    graphs = []

    def keep(module, _):
        targets = [str(node.target) for node in module.graph.nodes]
        graphs.append(collections.Counter(name.split(".")[1] for name in targets if name.startswith("zeropp_fp8")))
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    with compiled_by(backend):
        model, _ = llama_of(True)
        tokens = torch.arange(38).view(2, 19)
        model(input_ids=tokens, labels=tokens).loss.backward()
    # q, k and v; o; gate and up; down; and seven weights, which backward casts once more beside seven gradients
    assert graphs == [{"cast": 4 + 7}, {"cast": 7 + 7}]


class Writer(nn.Module):
    """Writes into what layers have taken, and gives it to them again."""

    def __init__(self):
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(WIDTH), Block()

    def forward(self, x):
        y = self.norm(x)
        first = self.layers.q_proj(y)
        y.add_(1.0)
        return first + self.layers.q_proj(y) + self.layers.k_proj(y) * y


def test_an_input_that_is_written_to():
    """Its operands no longer serve."""
    found = []
    for in_a_graph in (False, True):
        torch.manual_seed(0)
        model = Writer().bfloat16()
        report = convert_linear_layers(model, SCALINGS["delayed"])
        run = torch.compile(model, backend="aot_eager") if in_a_graph else model
        for _ in range(STEPS):
            x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
            model.zero_grad()
            y = run(x)
            y.float().square().sum().backward()
            report.scaling.end_step()
            found.append([y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    for one, other in zip(found, found[STEPS:]):
        assert len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))
