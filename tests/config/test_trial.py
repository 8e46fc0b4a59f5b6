"""Experiments: every recipe with each of its pieces in high precision is a configuration that holds; and the watch."""

import math

import pytest
from config_cases import BF16, ds_config, refusal, resolved

from zeropp_fp8.config import (
    RECIPES,
    TRIAL_VARIABLE,
    ConfigError,
    Place,
    Trial,
    find_ranks_per_node,
    pieces_of,
    resolve,
)
from zeropp_fp8.numerics.bisect import halved

PIECES = {
    "lossless": [],
    "zeropp": ["weights", "gradients_within", "gradients_between"],
    "zeropp-exact": ["gradients_within", "gradients_between"],
    "mxfp8": ["weights", "gradients_within", "gradients_between", "compute"],
    "fp8-lm-o1": ["gradients", "compute"],
    "fp8-lm": ["weights", "gradients", "compute", "optimizer", "activations"],
    "fp8-lm-zeropp": ["weights", "gradients_within", "gradients_between", "gradients_at_rest", "compute", "optimizer"]
    + ["activations"],
    "qlora": ["weights", "gradients_within", "gradients_between", "frozen"],
}


@pytest.fixture
def tried(monkeypatch):
    def resolve_it(section, **trial):
        monkeypatch.setenv(TRIAL_VARIABLE, Trial(steps=3, file="f", **trial).model_dump_json())
        return resolved(section, **BF16)

    return resolve_it


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_each_piece_by_itself_and_all(recipe, tried):
    section = {"recipe": recipe, "numerics": {"every": 5}, "gather_granularity": "module"}
    config = resolved(section, **BF16)
    pieces = pieces_of(config)
    assert pieces == PIECES.get(recipe, pieces)
    for piece in pieces:
        one = tried(section, high=[piece])
        assert pieces_of(one) == [other for other in pieces if other != piece]
        assert one.numerics.every == 0 and one.secondary == config.secondary
    for high in (pieces, ["all"]):
        everything = tried(section, high=high)
        assert not everything.quantizes or everything.partition != "slice"
        assert everything.gather_granularity == "module"
    assert tried(section, high=["all"]).recipe == "lossless" and not everything.quantizes


def test_layers_in_high_precision(tried):
    config = tried({"recipe": "mxfp8", "compute": {"skip_modules": ["head"]}}, skip_modules={"compute": ["a.b", "c"]})
    assert config.compute.skip_modules == ["head", "a.b", "c"]
    assert tried({"recipe": "mxfp8"}, high=["compute"], skip_modules={"compute": ["a"]}).compute.format == "none"
    both = tried({"recipe": "zeropp"}, skip_modules={"weights": ["a"], "gradients": ["b"]})
    assert (both.weights.skip_modules, both.gradients.skip_modules) == (["a"], ["b"])
    assert pieces_of(both) == pieces_of(resolved({"recipe": "zeropp"}))


def test_gemms_in_high_precision(tried):
    """Besides those of the section, whichever way it names them."""
    for named, expected in (
        ({}, {"output": ["a"]}),
        (["output"], {"output": ["*", "a"]}),
        ({"output": ["b"], "grad_input": ["c"]}, {"output": ["b", "a"], "grad_input": ["c"]}),
    ):
        section = {"compute": {"format": "fp8", "high_precision_gemms": named}} if named else {"recipe": "mxfp8"}
        assert tried(section, gemms={"output": ["a"]}).compute.high_precision_gemms == expected


def test_trials_that_cannot_be(monkeypatch, tried):
    with pytest.raises(ConfigError, match='"optimiser" is no piece'):
        tried({"recipe": "fp8-lm"}, high=["optimiser"])
    monkeypatch.setenv(TRIAL_VARIABLE, '{"steps": 3}')
    with pytest.raises(ConfigError, match=f"{TRIAL_VARIABLE} is set by"):
        resolve(ds_config({"recipe": "zeropp"}))
    assert resolve(ds_config(None)) is None
    places = [Place(rank, "a", "detect", {}, "x" * (rank > 1)) for rank in range(4)]
    with pytest.raises(ConfigError, match="differs between rank 0 and rank 2: the launcher"):
        find_ranks_per_node(places, 4)


@pytest.mark.parametrize("guilty", [{3}, {0}, {6}, {2, 3}, {1, 5}])
def test_layers_are_halved_down_to_those_at_fault(guilty):
    """A distance that each guilty layer adds to, and each other one hardly."""
    layers, runs = [f"layer{i}" for i in range(7)], []

    def remaining(some):
        runs.append(some)
        return sum(1.0 if i in guilty else 0.01 for i in range(7) if layers[i] not in some)

    before = remaining([])
    found = halved(layers, remaining, before, carried=before - remaining(layers))
    # One in each half: either takes half of it away.
    assert found == (layers if len(guilty) > 1 else [f"layer{i}" for i in guilty])
    assert len(runs) <= 2 + 2 * 3


@pytest.mark.parametrize("guilty", [{3}, {1, 5}])
def test_layers_that_make_a_loss_infinite_are_halved_too(guilty):
    """While one of them computes so, the distance is infinite; neither half alone is at fault then."""
    layers = [f"layer{i}" for i in range(7)]

    def remaining(some):
        return math.inf if any(layers[i] not in some for i in guilty) else 0.01

    assert halved(layers, remaining, math.inf, math.inf) == (layers if len(guilty) > 1 else ["layer3"])


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"recipe": "lossless"}, ["nothing is in low precision"]),
        ({"recipe": "lossless", "optimizer": {"exp_avg_format": "fp8_e4m3"}}, ['by "optimizer" stays rounded']),
        ({"frozen": {"format": "nf4"}}, ['by "frozen" stays rounded']),
        (
            {"optimizer": {"master_format": "fp16"}, "frozen": {"format": "nf4"}},
            ['what is stored by "optimizer" and "frozen" stays'],
        ),
        ({"secondary": {"scope": "node"}}, ["nothing is in low precision"]),
        ({"secondary": {"scope": "node"}, "weights": {"difference": "exact"}}, ["nothing is in low precision"]),
    ],
)
def test_nothing_to_fall_back_from(section, words):
    message = refusal({**section, "numerics": {"watch": "fall_back"}}, **BF16)
    words = ['"zeropp_fp8.numerics.watch": "fall_back" has nothing', 'use "stop", or set formats', *words]
    assert all(word in message for word in words), message
    assert resolved({**section, "numerics": {"watch": "stop"}}, **BF16).observed


@pytest.mark.parametrize(
    "section",
    [
        *({"recipe": recipe} for recipe in sorted(RECIPES) if recipe != "lossless"),
        {"compute": {"format": "fp8"}},
        {"compute": {"format": "fp8"}, "compile": "blocks"},
        {"weights": {"format": "int8"}},
        {"gradients": {"inter_format": "int4"}},
        {"activations": {"wire_format": "fp8"}},
    ],
    ids=str,
)
def test_what_falls_back(section):
    found = [resolved({**section, "numerics": given}, **BF16) for given in ({"watch": "fall_back"}, {"every": 1}, {})]
    assert [config.observed for config in found] == [True, True, False]
