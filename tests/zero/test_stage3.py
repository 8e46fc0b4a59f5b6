"""DeepSpeed's methods that a stage answers: each by one of the things that it has, under names that DeepSpeed has."""

import pytest
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from zeropp_fp8.zero.as_deepspeed import FP32States, Partitions, SliceLayout
from zeropp_fp8.zero.looking import Looking
from zeropp_fp8.zero.owners.layout import OwnerLayout
from zeropp_fp8.zero.reduce.backwards import Backwards
from zeropp_fp8.zero.reduce.buckets import Buckets
from zeropp_fp8.zero.reduce.hooks import GradientHooks
from zeropp_fp8.zero.reduce.reduction import Reduction
from zeropp_fp8.zero.stage3 import ANSWERED, ZeroppStage3
from zeropp_fp8.zero.states.stored_gradients import StoredGradients
from zeropp_fp8.zero.states.stored_states import StoredStates

# What a stage may have under each name.
CLASSES = {
    "hooks": (GradientHooks,),
    "backwards": (Backwards,),
    "reduction": (Reduction,),
    "buckets": (Buckets,),
    "gradients": (Partitions, StoredGradients),
    "states": (FP32States, StoredStates),
    "layout": (SliceLayout, OwnerLayout),
    "looking": (Looking,),
}
NAMES = {name.removeprefix("_DeepSpeedZeroOptimizer_Stage3__"): name for n in ANSWERED.values() for name in n.split()}


def public(cls):
    return {name for name in vars(cls) if not name.startswith("_")}


def test_each_method_is_answered_by_one():
    listed = [name for names in ANSWERED.values() for name in names.split()]
    assert len(listed) == len(set(listed)) and set(ANSWERED) == set(CLASSES)
    assert [name for name in listed if not hasattr(DeepSpeedZeroOptimizer_Stage3, name)] == []
    for attribute, names in ANSWERED.items():
        for name in names.split():
            there = name.removeprefix("_DeepSpeedZeroOptimizer_Stage3__")
            assert any(there in vars(cls) for cls in CLASSES[attribute]), f"{attribute} never answers {name}"


@pytest.mark.parametrize(("attribute", "classes"), CLASSES.items())
def test_what_has_deepspeeds_name_is_listed(attribute, classes):
    """An answer that is not asked for would be passed over in silence."""
    asked_by_the_stage = {"has_overflow", "get_fp32_grad_partitions"}
    for cls in classes:
        of_deepspeed = {name for name in vars(cls) if name in dir(DeepSpeedZeroOptimizer_Stage3) and name[:2] != "__"}
        assert of_deepspeed - asked_by_the_stage <= set(ANSWERED[attribute].split()), cls


@pytest.mark.parametrize("name", ["gradients", "states", "layout"])
def test_both_ways_have_the_same_methods(name):
    """The stage asks either without knowing which it has."""
    stock, other = CLASSES[name]
    answers = set(NAMES)
    assert public(stock) - answers <= public(other)


def test_who_is_asked(monkeypatch):
    """A stage answers what it has; for the rest DeepSpeed's own method does."""

    class Answers:
        def partition_grads(self, *args):
            return "answered", args

    stage = object.__new__(ZeroppStage3)
    stage.buckets, stage.reduction, stage.stock = Answers(), Answers(), super(ZeroppStage3, stage)
    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "zero_grad", lambda self, *args: ("stock", self, args))
    assert stage.partition_grads([1], [2]) == ("answered", ([1], [2]))
    assert stage.zero_grad(False) == ("stock", stage, (False,))
