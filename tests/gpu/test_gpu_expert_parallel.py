"""Experts on two of four ranks (AutoEP) over NCCL, as tests/system/parity/test_expert_parallel.py has them on gloo."""

import pytest
from on_ranks import results_of

pytestmark = pytest.mark.gpu
EQUAL = [
    ("stock, again", "stock"),  # a control: nothing here is random
    ("lossless", "stock"),
    ("lossless, delays", "stock"),
    ("zeropp, delays", "zeropp"),
    ("zeropp, whole", "zeropp"),
    ("zeropp, tokens in FP8, delays", "zeropp, tokens in FP8"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of the script, by case; it runs once, on four ranks as two nodes."""
    return results_of("expert_parallel_script", 4, tmp_path_factory.mktemp("expert_parallel"))


@pytest.mark.parametrize("case, reference", EQUAL)
def test_bit_for_bit(found, case, reference):
    for key in ("losses", "norms", "weights"):
        assert found[case][key] == found[reference][key], key


@pytest.mark.parametrize("case", ["zeropp", "zeropp, tokens in FP8", "zeropp-exact"])
def test_recipes_train_like_stock(found, case):
    assert found[case]["losses"] == pytest.approx(found["stock"]["losses"], rel=1e-2)
    assert found[case]["weights"] != found["stock"]["weights"]


def test_tokens_in_fp8(found):
    """A token is 128 codes, and a scale in 16 bytes."""
    whole, rounded = (sum(found[case]["bytes"]["activations"].values()) for case in ("zeropp", "zeropp, tokens in FP8"))
    assert rounded == pytest.approx(whole * (128 + 16) / 256, rel=0.1)
