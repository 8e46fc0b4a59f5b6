"""The doctor on GPUs: kernels against reference bytes, rates of links, and recipes as the plan has them."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
from hang_guard import HANG

from tests.places import python_path
from zeropp_fp8 import kernels
from zeropp_fp8.doctor.kernels import FORMATS, kernel_differences
from zeropp_fp8.plan import METHODS, Cluster, Hardware, Job, Model, estimate

pytestmark = pytest.mark.gpu
PARAMETERS = 1.3e9
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def python(*words):
    """Return what a Python on this repository prints."""
    env = {**os.environ, "DS_ACCELERATOR": "cuda", "PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def diagnosed(path, *launcher):
    """(what is printed, what is written) of a doctor who finds nothing wrong."""
    text = python(*launcher, "-m", "zeropp_fp8", "doctor", "--params", str(PARAMETERS), "--json", str(path))
    assert text.endswith("no problem found\n")
    found = json.loads(path.read_text())
    assert found["status"] == 0 and not any(problem["serious"] for problem in found["problems"])
    return text, found


def check_ranks(text, found, ranks):
    """Each rank says what its GPU is; all have compared their kernels."""
    assert list(found["ranks"]) == [str(rank) for rank in range(ranks)]
    for rank, one in enumerate(found["ranks"].values()):
        device, properties = one["device"], torch.cuda.get_device_properties(rank)
        assert (device["name"], device["bytes"]) == (properties.name, properties.total_memory)
        assert device["capability"] == [properties.major, properties.minor]
        assert device["gemms"].keys() == {"delayed", "per_channel", "block", "mx"}
        assert one["kernels_tested"] and one["problems"] == []
        assert one["rates"].keys() == {"matrix_tflops", "fp8_tflops", "memory_gbs"}
        assert all(0 < rate < math.inf for rate in one["rates"].values())
    assert len({one["device"]["uuid"] for one in found["ranks"].values()}) == ranks
    assert f"  bytes       equal those of the torch code ({'rank 0' if ranks == 1 else 'ranks 0-1'})\n" in text
    assert f"device        {torch.cuda.get_device_name(0)}, compute capability " in text


def check_recipes(text, found, ranks):
    """They are the plan's, for the job, at the lowest rates that were measured."""
    job = Job(Model.from_parameters(PARAMETERS), Cluster(1, ranks, 0.0), 2048)
    hardware = Hardware(**found["hardware"])
    assert found["job"] == asdict(job)
    for name in ("matrix_tflops", "fp8_tflops", "memory_gbs"):
        assert getattr(hardware, name) == min(one["rates"][name] for one in found["ranks"].values())
    within = found["links"]["within"]
    assert within is None or hardware.intra_gbs == min(within["all_gather_gbs"], within["all_to_all_gbs"])
    planned = ["stock", "lossless", "zeropp"] if ranks > 1 else ["stock", "lossless"]  # one rank sends nothing
    assert [row["method"] for row in found["recipes"]][: len(planned)] == planned
    for row in found["recipes"]:
        assert 0 < row["step_s"] < math.inf and row["inter_bytes"] == 0
        if row["method"] != "zeropp-pcie":  # planned as nodes of one GPU
            assert row["step_s"] == pytest.approx(estimate(METHODS[row["method"]], job, hardware).step_s)
        assert re.search(rf"^{row['method']} +{1e3 * row['step_s']:.1f} ", text, flags=re.M)
    assert found["advice"] in text and found["recommended"] in {row["method"] for row in found["recipes"]}


def test_one_gpu(tmp_path):
    text, found = diagnosed(tmp_path / "doctor.json")
    assert (found["nodes"], found["ranks_per_node"], found["links"]) == (1, 1, {"within": None, "between": None})
    check_ranks(text, found, 1)
    check_recipes(text, found, 1)


def test_two_gpus(tmp_path):
    """All that it says of them (that rates are those of the link: tests/doctor/test_diagnosis.py, by a made clock)."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices; this machine has one")
    text, found = diagnosed(tmp_path / "doctor.json", *TORCHRUN)
    assert (found["nodes"], found["ranks_per_node"], found["links"]["between"]) == (1, 2, None)
    check_ranks(text, found, 2)
    check_recipes(text, found, 2)
    assert "zeropp-pcie" in {row["method"] for row in found["recipes"]}
    assert all(0 < rate < math.inf for rate in found["links"]["within"].values())


def test_a_wrong_byte_is_found(monkeypatch):
    """It is the kernels of the GPU that are compared."""
    device = torch.device("cuda", 0)
    assert kernel_differences(device) == []
    quantize = kernels.quantize

    def wrong_byte(base, tensors, segments, slices, payload, *others):
        quantize(base, tensors, segments, slices, payload, *others)
        assert payload.is_cuda
        payload[1, 5] ^= 1

    monkeypatch.setattr(kernels, "quantize", wrong_byte)
    expected = [f"kernel: {name}, encoded: 1 of" for name in FORMATS]
    assert [line.partition(" of")[0] + " of" for line in kernel_differences(device)] == expected
