"""Updates without an engine: every bit comes, of whatever tensors; what does not follow or is damaged is refused."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Trainer, integers_of

from zeropp_fp8.receiving import Header, MissedUpdate, Receiver, Update

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool]
SHAPES = st.lists(st.integers(0, 40), min_size=1, max_size=2).map(tuple)


def random_bits(shape, dtype, generator):
    """Any bits that the dtype has, NaN and infinities among them."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def same(receiver, groups):
    tensors = {name: tensor for group in groups for name, tensor in group.items()}
    held = receiver.weights
    return held.keys() == tensors.keys() and all(
        torch.equal(integers_of(held[n]), integers_of(t)) for n, t in tensors.items()
    )


def through_json(update):
    """As it gets to another process."""
    return Update(Header(**json.loads(json.dumps(vars(update.header)))), update.tensors)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=5),
    st.integers(1, 4),
    st.sampled_from([1, 7, 1000, 5000]),
    st.integers(0, 2**31),
)
def test_every_bit_comes(tensors, world, piece, seed):
    """At first, where nothing has changed, where few elements have, and where all have."""
    generator = torch.Generator().manual_seed(seed)
    named = [(f"t{n}", random_bits(shape, dtype, generator)) for n, (dtype, shape) in enumerate(tensors)]
    groups = [dict(named[:2]), dict(named[2:])] if named[2:] else [dict(named)]
    trainer, receiver = Trainer(world, piece), Receiver()
    for share in (1.0, 0.0, 0.05, 1.0):
        for group in groups:
            for name, tensor in group.items():
                mask = torch.rand(tensor.shape, generator=generator) < share
                group[name] = torch.where(mask, random_bits(tensor.shape, tensor.dtype, generator), tensor)
        made = trainer.updates(groups)
        for update in map(through_json, made):
            receiver.apply(update)
        assert same(receiver, groups)
        if share == 0.0:
            assert not any(update.tensors for update in made)
    assert receiver.version == 4


def small_step(tensor, generator, share=0.01):
    """A share of the elements one unit in the last place further, as after a step of a small learning rate."""
    mask = torch.rand(tensor.shape, generator=generator) < share
    return torch.where(mask, (tensor.view(torch.int16) + 1).view(tensor.dtype), tensor)


def model(generator):
    return [
        {"a": torch.randn(64, 64, generator=generator).bfloat16()},
        {"b": torch.randn(5000, generator=generator).bfloat16()},
    ]


def stepped(groups, generator):
    return [{name: small_step(tensor, generator) for name, tensor in group.items()} for group in groups]


def test_few_bits():
    """1 % of bf16 weights that have changed by a unit take less than a quarter of a bit each."""
    generator = torch.Generator().manual_seed(0)
    groups, trainer = [{"a": torch.randn(512, 1024, generator=generator).bfloat16()}], Trainer(2, 512 * 512)
    trainer.updates(groups)
    (update,) = trainer.updates(stepped(groups, generator))
    assert 0 < 8 * sum(update.header.sizes) / groups[0]["a"].numel() < 0.25


@pytest.fixture
def story():
    """(trainer, groups of three versions, their updates)"""
    generator = torch.Generator().manual_seed(0)
    trainer, versions = Trainer(), [model(generator)]
    versions += [stepped(versions[-1], generator) for _ in range(1)]
    versions += [stepped(versions[-1], generator)]
    return trainer, versions, [trainer.updates(groups) for groups in versions]


def applied(*updates):
    receiver = Receiver()
    for update in updates:
        receiver.apply(update)
    return receiver


def test_a_version_that_was_missed(story):
    """It is said before anything is written; all weights make it good."""
    trainer, versions, (first, second, third) = story
    receiver = applied(*first)
    with pytest.raises(MissedUpdate, match="version 3 differs from version 2, and 1 is here"):
        receiver.apply(third[0])
    assert receiver.version == 1 and same(receiver, versions[0])
    for update in (*second, *third):
        receiver.apply(update)
    assert receiver.version == 3 and same(receiver, versions[2])
    with pytest.raises(MissedUpdate, match="version 2 differs from version 1, and None is here"):
        applied(second[0])
    trainer.forget()
    receiver = applied(*trainer.updates(versions[1]))
    assert receiver.version == 4 and same(receiver, versions[1])


def test_a_group_that_was_missed(story):
    """A version that is not there as a whole is none."""
    _, _, (first, second, third) = story
    receiver = applied(*first)
    with pytest.raises(MissedUpdate, match="group 1 of version 2 came, and 0 of None was due"):
        receiver.apply(second[1])
    receiver.apply(second[0])
    assert receiver.version is None
    with pytest.raises(MissedUpdate, match="group 1 of version 3 came, and 1 of 2 was due"):
        receiver.apply(third[1])
    with pytest.raises(MissedUpdate, match="version 3 differs from version 2, and None is here"):
        receiver.apply(third[0])
    receiver.apply(second[1])
    assert receiver.version == 2


@pytest.mark.parametrize("swapped", [False, True])
def test_weights_that_something_else_has_written_to(story, swapped):
    """One bit, or two elements that were exchanged: the checksum of the version tells."""
    _, _, (first, second, _) = story
    receiver = applied(*first)
    bits = integers_of(receiver.weights["b"])
    if swapped:
        bits[[17, 4000]] = bits[[4000, 17]]
    else:
        bits[17] ^= 1
    receiver.apply(second[0])
    with pytest.raises(MissedUpdate, match="b of version 2 have another checksum than where they come from"):
        receiver.apply(second[1])
    assert receiver.version is None


def test_weights_of_a_model(story):
    """They are written in place; others are refused by name."""
    _, versions, (first, second, _) = story
    weights = {"a": torch.zeros(64, 64, dtype=torch.bfloat16), "b": torch.zeros(5000, dtype=torch.bfloat16)}
    places = {name: tensor.data_ptr() for name, tensor in weights.items()}
    receiver = Receiver(weights)
    for update in (*first, *second):
        receiver.apply(update)
    assert same(receiver, versions[1]) and places == {name: t.data_ptr() for name, t in weights.items()}
    with pytest.raises(ValueError, match=r"b of torch.bfloat16 \[5000\] came, and nothing of that name is here"):
        Receiver({"a": weights["a"]}).apply(first[0]._replace(header=replace(first[1].header, number=0)))
    with pytest.raises(ValueError, match=r"and torch.float32 \[5000\] of that name is here"):
        Receiver({"b": torch.zeros(5000)}).apply(first[0]._replace(header=replace(first[1].header, number=0)))


def test_tied_weights():
    """They are one tensor of a trainer too, or refused: one of them would have the numbers of the other."""
    weight = torch.zeros(5)
    receiver, named = Receiver({"a": weight, "b": weight}), {"a": torch.ones(5), "b": torch.full((5,), 2.0)}
    for update in Trainer().updates([{"a": named["a"]}]):
        receiver.apply(update)
    assert weight.tolist() == [1.0] * 5
    with pytest.raises(ValueError, match="a and b came with numbers of their own, and are one tensor here: untie them"):
        for update in Trainer().updates([{name: tensor} for name, tensor in named.items()]):
            receiver.apply(update)


def test_an_engine_s_process_needs_no_deepspeed():
    script = "import sys, zeropp_fp8.receiving; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
