"""Looking at weights changes nothing in training, whatever the way of looking.

save_16bit_model and many libraries gather with `modifier_rank=0`, as if to write. Were that to count as a write, copies
would be encoded again and delayed scaling would lose its history.
"""

import itertools

import looking_jobs as jobs
import pytest
from ranks import run_two
from running import differing
from thinning import thinned

WAYS = [
    "lossless, node's copy",
    "lossless, delayed FP8 compute",
    "zeropp, no copy",
    "FP8 operands, node's copy",
    "mxfp8",
    "fp8-lm-o2",
    "fp8-lm",
    "stored",
]


@pytest.mark.parametrize("way, looks", thinned(WAYS, itertools.pairwise([*jobs.LOOKS, "save_checkpoint"])))
def test_training_goes_on_bit_for_bit(way, looks):
    dtype = "bf16" if way.startswith("fp8-lm") else "fp32"
    runs = run_two(jobs.looks, way=way, looks=("nothing", *looks), dtype=dtype)[0]
    nothing = runs.pop("nothing")
    differences = {look: differing(trace, nothing) for look, trace in runs.items()}
    assert len(differences) == len(looks) and not any(differences.values()), differences


def test_what_is_written_is_read():
    """Also where slices end beyond the tensor, which DeepSpeed's own functions cannot write."""
    ways = ["lossless, node's copy", "zeropp, no copy", "fp8-lm-o2"]
    for found in run_two(jobs.written_and_read, ways=ways):
        assert found.keys() == set(ways) and not any(found.values()), found
