"""The parts of a stage, one before the other: what an earlier one overrides is not lost in a later one."""

import inspect
from itertools import combinations

import pytest

from zeropp_fp8.zero.owners.stage3 import OwnersStage3
from zeropp_fp8.zero.stage3 import ZeroppStage3
from zeropp_fp8.zero.states.stage3_gradients import StoredGradientsStage3
from zeropp_fp8.zero.states.stage3_states import CompressedStatesStage3

# In the order in which make_stage3 puts them.
PARTS = (ZeroppStage3, CompressedStatesStage3, StoredGradientsStage3, OwnersStage3)
# Methods that take another's place: the later part is for fp32 states, or for gradients that DeepSpeed keeps.
REPLACE = {
    (CompressedStatesStage3, StoredGradientsStage3): {"_prepare_fp32_grad_for_sub_group"},
    (CompressedStatesStage3, OwnersStage3): {"set_full_hp_param"},
    (StoredGradientsStage3, OwnersStage3): {"set_fp32_grad_for_param", "update_fp32_grad_for_param_vectorized"},
}


@pytest.mark.parametrize(("first", "later"), combinations(PARTS, 2), ids=lambda part: part.__name__)
def test_no_part_hides_another(first, later):
    """Such a method of the first part hid how states in low precision and stored gradients are given to a step."""
    both = [name for name, value in vars(first).items() if inspect.isfunction(value) and name in vars(later)]
    hidden = {name for name in both if f"super().{name}(" not in inspect.getsource(vars(first)[name])}
    assert hidden == REPLACE.get((first, later), set())


def test_there_is_something_to_look_at():
    assert "has_overflow" in vars(ZeroppStage3).keys() & vars(StoredGradientsStage3).keys()
