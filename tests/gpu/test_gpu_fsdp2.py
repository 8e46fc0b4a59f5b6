"""The collectives under fully_shard over NCCL: what tests/system/fsdp2 asserts over gloo, and streams that stop."""

import pytest
from on_ranks import results_of

pytestmark = pytest.mark.gpu
FAMILIES = ("", ", micro-batches", ", compiled", ", offloaded", ", copies")
EQUAL = [
    ("stock, again", "stock"),  # a control: nothing here is random
    *[(f"lossless{name}", f"stock{name}") for name in FAMILIES],
    ("lossless, one node", "stock"),
    ("lossless, delays", "stock"),
    ("lossless, prefetches, delays", "stock"),
    ("lossless, copies, delays", "stock, copies"),
    ("zeropp, again", "zeropp"),
    ("zeropp, delays", "zeropp"),
    ("zeropp, prefetches, delays", "zeropp"),
    ("zeropp, evaluates, delays", "zeropp"),
    ("zeropp, whole", "zeropp"),
    ("zeropp, micro-batches, delays", "zeropp, micro-batches"),
    ("zeropp, copies, delays", "zeropp, copies"),
    ("zeropp, one node, delays", "zeropp, one node"),
    ("zeropp-exact, delays", "zeropp-exact"),
    ("zeropp-exact, whole", "zeropp-exact"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of the script, by case; it runs once, on two ranks."""
    return results_of("fsdp2_script", 2, tmp_path_factory.mktemp("fsdp2"))


@pytest.mark.parametrize("case, reference", EQUAL)
def test_bit_for_bit(found, case, reference):
    for key in ("losses", "norms", "weights"):
        assert found[case][key] == found[reference][key], key


@pytest.mark.parametrize("case", [f"zeropp{name}" for name in FAMILIES] + ["zeropp-exact", "zeropp-4bit"])
def test_recipes_train_like_stock(found, case):
    stock = "stock" + case.partition(",")[1] + case.partition(",")[2]
    assert found[case]["losses"] == pytest.approx(found[stock]["losses"], rel=1e-2)
    assert found[case]["weights"] != found[stock]["weights"]
    sent = {kind: of_kind["inter"] for kind, of_kind in found[case]["bytes"].items()}
    assert sent["weights_backward"] == 0 and sent["gradients"] > 0
    assert (sent["weights_forward"] > 0) == (case != "zeropp, copies")


def test_compiled_blocks_are_compiled(found):
    """They round otherwise: the cases above would hold of blocks that are not, too."""
    assert found["stock, compiled"]["losses"] != found["stock"]["losses"]


def test_accelerate(tmp_path):
    """A model that Accelerate shards: `lossless` trains as without it bit for bit, `zeropp` closely, in fewer bytes."""
    found = results_of("accelerate_script", 2, tmp_path)
    stock, exact, rounded = (found[recipe] for recipe in ("None", "lossless", "zeropp"))
    assert (exact["losses"], exact["norms"]) == (stock["losses"], stock["norms"])
    assert rounded["losses"] == pytest.approx(stock["losses"], rel=1e-2) and rounded["losses"] != stock["losses"]
    assert all(result["sharded"].startswith("FSDP") for result in found.values())
    sent = [sum(kind["inter"] for kind in result["bytes"].values()) for result in (exact, rounded)]
    assert 0 < sent[1] < 0.5 * sent[0]
