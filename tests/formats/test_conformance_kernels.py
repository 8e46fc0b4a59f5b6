"""The kernels of every format: the torch code's bytes and values in Triton's interpreter, and what they compile to.

A case's id says check, format and dtype. All cases of a kind that are asked for run in two processes at once, forked
from a server (triton_process.py): whether Triton interprets or compiles is decided when it is imported.
"""

import json

import pytest
import torch
from triton_process import run

pytest.importorskip("triton")
from payload_checks import INTERPRETED
from ptx_checks import COMPILED

from zeropp_fp8.formats import make_format

SCRIPT = """
import json, traceback
from {module} import {table}

for case in mine({cases}):
    said = None
    try:
        {table}[case]()
    except Exception:
        said = traceback.format_exc()
    print(json.dumps([case, said]))
"""


def outcomes(request, test, module, table):
    """Return what went wrong in each case that was asked for, by its id."""
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params["case"] for item in items if item.originalname == test]
    script = SCRIPT.format(module=module, table=table, cases=cases)
    printed = run(script, interpret=table == "INTERPRETED", processes=2)
    return dict(json.loads(line) for line in printed.splitlines())


@pytest.fixture(scope="module")
def interpreted(request):
    return outcomes(request, "test_interpreter", "payload_checks", "INTERPRETED")


@pytest.fixture(scope="module")
def compiled(request):
    return outcomes(request, "test_compiled", "ptx_checks", "COMPILED")


@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreter(interpreted, case):
    assert interpreted[case] is None, interpreted[case]


@pytest.mark.parametrize("case", COMPILED)
def test_compiled(compiled, case):
    assert compiled[case] is None, compiled[case]


def test_kernels_that_encode_or_sum_refuse_what_they_would_take_for_something_else():
    from zeropp_fp8 import kernels

    cpu, numel = torch.device("cpu"), 1024
    tensor, slices = torch.ones(numel), torch.zeros(1, dtype=torch.int32)
    int8 = kernels.SegmentTable(make_format("int8", block_size=64), [numel], [0], cpu)
    for options in ({"name": "nf4"}, {"name": "int8", "block_size": 64, "double_quantize": True}):
        fmt = make_format(**options)
        table = kernels.SegmentTable(fmt, [numel], [0], cpu)
        places = kernels.TensorTable([tensor], table, cpu)
        payload = fmt.encode(tensor).view(1, -1)
        with pytest.raises(ValueError, match=f"{options['name']} with '.*' scales: kernels only decode"):
            kernels.quantize(tensor, places, table, slices, payload)
        with pytest.raises(ValueError, match="kernels only decode"):
            kernels.reduce_to_tensors(payload, table, tensor, places)
        for pair in ((table, int8), (int8, table)):
            with pytest.raises(ValueError, match="kernels only decode"):
                kernels.reduce_to_payload(payload.view(1, 1, -1), *pair, payload)
