"""Messages of gradients that are not quantized, beside DeepSpeed's own."""

import random
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.comm import coalesced_collectives

from zeropp_fp8.comm.reduce_scatter import slice_numel
from zeropp_fp8.zero.reduce.buckets import _message


def deepspeeds(grads, world_size, rank, monkeypatch):
    """Return the messages that DeepSpeed sends of these gradients, and the parts of the sum that a rank keeps."""
    sent = []
    ranks = SimpleNamespace(get_rank=lambda group: rank, get_world_size=lambda group: world_size)
    monkeypatch.setattr(coalesced_collectives, "dist", ranks)
    monkeypatch.setattr(coalesced_collectives, "_torch_reduce_scatter_fn", lambda flat, out, group: sent.append(flat))
    return sent, coalesced_collectives.reduce_scatter_coalesced([grad.clone() for grad in grads])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_messages_are_deepspeeds(world_size, dtype, monkeypatch):
    """Element by element, wherever it lies: a sum of more than two ranks depends on that. Padding may differ."""
    draw = random.Random(world_size)
    for _ in range(20):
        shapes = [(draw.randint(1, 9), draw.randint(1, 9))[: draw.randint(1, 2)] for _ in range(draw.randint(1, 5))]
        grads = [torch.rand(shape).add_(1).to(dtype) for shape in shapes]
        sizes = [slice_numel(grad.numel(), world_size) for grad in grads]
        mine = _message([grad.clone() for grad in grads], sizes, world_size).div_(world_size)
        filled = mine != 0
        assert filled.sum() == sum(grad.numel() for grad in grads)
        for rank in range(world_size):
            (theirs,), kept = deepspeeds(grads, world_size, rank, monkeypatch)
            assert mine.shape == theirs.shape and torch.equal(mine[filled], theirs[filled]), shapes
            for part, expected in zip(mine.view(world_size, -1)[rank].split(sizes), kept, strict=True):
                assert torch.equal(part[: expected.numel()], expected), shapes


def test_a_gradient_alone_is_not_copied():
    grad = torch.ones(4, 2)
    assert _message([grad], [4], 2).data_ptr() == grad.data_ptr()
    assert _message([grad], [3], 3).data_ptr() != grad.data_ptr(), "three ranks need padding"


def test_gradients_without_elements():
    assert _message([torch.empty(0)], [0], 2).numel() == 0
    assert _message([torch.empty(0, 3), torch.ones(3)], [0, 2], 2).tolist() == [1, 1, 1, 0]
