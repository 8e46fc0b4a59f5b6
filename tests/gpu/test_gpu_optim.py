"""The AdamW kernel, natively on a GPU, against the torch code on the CPU; memory, determinism, no waiting."""

import pytest
import torch
from optim_cases import (
    BF16,
    BLOCK,
    FP32,
    KERNEL_CASES,
    TENSOR,
    StateFormats,
    adamw_step,
    assert_same_buffers,
    check_encode_several,
    check_kernel,
    run_steps,
)

from zeropp_fp8.optim import Hyper, Segments, make_state_buffers

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPES = [((33, 7), torch.float32), ((150_000,), torch.bfloat16), ((), torch.float32), ((0, 3), torch.float32)]
SHAPES += [((400, 40), torch.bfloat16), ((5,), torch.float16)]


@pytest.mark.parametrize("formats, grads, weights, options", KERNEL_CASES)
def test_kernel(formats, grads, weights, options):
    """Every format in every place, every kind of gradient: small segments and ones of many tiles."""
    numels = (150_001, 1, 0, 1024, 7, 130, 66_000)
    check_kernel(formats, grads, weights, CUDA, numels=numels, steps=3, **options)


@pytest.mark.parametrize("formats", [TENSOR, BLOCK])
def test_many_segments_and_the_same_twice(formats):
    """A hundred tensors; atomic operations in any order give the same bytes."""
    numels = [1 + (i * 7919) % 20_000 for i in range(100)]
    check_kernel(formats, BF16, BF16, CUDA, numels=numels, steps=2)
    one, two = (run_steps(True, formats, BF16, BF16, CUDA, numels=numels)[0] for _ in range(2))
    assert_same_buffers(one, two)


def test_torch_code_on_the_gpu_is_that_on_the_cpu():
    for formats in (TENSOR, BLOCK, StateFormats("bf16", "fp8_e5m2", "fp32")):
        assert_same_buffers(*(run_steps(False, formats, BF16, FP32, d)[0] for d in (CUDA, "cpu")))


def test_more_than_two_to_the_31_elements():
    """Offsets beyond 32 bits: the last elements are updated as the first ones are."""
    numel = (1 << 31) + (1 << 27)
    if torch.cuda.mem_get_info()[0] < 30e9:
        pytest.skip("needs 30 GB of free GPU memory")
    segments = Segments([numel, 1000], CUDA)
    buffers = make_state_buffers(segments, BLOCK)
    grads = [torch.zeros(n, dtype=torch.bfloat16, device=CUDA) for n in segments.numels]
    weights = [torch.empty_like(g) for g in grads]
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(CUDA, torch.bfloat16)
    for ends in (grads[0][:1000], grads[0][-1000:], grads[1]):
        ends.copy_(values)
    adamw_step(segments, *buffers, grads, weights, Hyper(1e-2))
    assert not weights[0][1000:-1000].any()
    assert torch.equal(weights[0][:1000].sign(), -values.sign())
    # 2^31 is a multiple of the block of 128, the last 1000 elements are no whole number of blocks
    torch.testing.assert_close(weights[0][-1000:], weights[1], rtol=0.01, atol=1e-5)
    torch.testing.assert_close(weights[0][:1000], weights[1], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [16, 128, 1024])
@pytest.mark.parametrize("element", ["fp8_e4m3", "fp8_e5m2"])
def test_segments_encoded_at_once(element, block, dtype):
    check_encode_several(element, block, dtype, CUDA)
