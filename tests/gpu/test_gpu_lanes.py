"""Buffers for one gather on a GPU: no stream reads or writes memory that is another's at that time."""

import pytest
import torch

from zeropp_fp8.comm.lanes import Lane, buffer_for, on_one_stream, used_last

pytestmark = pytest.mark.gpu
BYTES = 1 << 26
LONG = 200_000_000  # cycles: 0.1 s, a thousand times what the fills and copies here take


@pytest.fixture
def device():
    torch.cuda.empty_cache()
    return torch.device("cuda", torch.cuda.current_device())


def test_the_lane_waits_for_who_had_the_memory(device):
    lane = Lane(device)
    theirs = torch.full((BYTES,), 5, dtype=torch.uint8, device=device)
    seen = torch.empty_like(theirs)
    place = theirs.data_ptr()
    torch.cuda._sleep(LONG)
    seen.copy_(theirs)
    del theirs
    buffer = buffer_for(lane, BYTES, device)
    assert buffer.data_ptr() == place, "the case did not occur"
    with lane:
        buffer.fill_(7)
    torch.cuda.synchronize()
    assert (seen == 5).all() and (buffer == 7).all()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same stream", "another stream"])
def test_who_gets_the_memory_waits_for_the_last_use(device, elsewhere):
    lane = Lane(device)
    current = torch.cuda.current_stream()
    last = torch.cuda.Stream() if elsewhere else current
    seen = torch.empty(BYTES, dtype=torch.uint8, device=device)
    buffer = buffer_for(lane, BYTES, device)
    place = buffer.data_ptr()
    with lane:
        buffer.fill_(7)
    with torch.cuda.stream(last):
        lane.before_current()
        torch.cuda._sleep(LONG)
        seen.copy_(buffer)
        used_last(buffer)
    del buffer
    theirs = torch.empty(BYTES, dtype=torch.uint8, device=device)
    assert (theirs.data_ptr() == place) != elsewhere, "the case did not occur"
    theirs.fill_(9)
    torch.cuda.synchronize()
    assert (seen == 7).all()


def test_the_memory_serves_the_current_stream_again(device):
    """Memory that many gathers need is there once; a buffer of the lane's own stays reserved for the lane."""
    lane = Lane(device)
    before = torch.cuda.memory_reserved()
    for _ in range(4):
        buffer = buffer_for(lane, BYTES, device)
        with lane:
            buffer.fill_(1)
        lane.before_current()
        used_last(buffer)
        del buffer
        values = torch.empty(BYTES, dtype=torch.uint8, device=device)
        values.fill_(2)
        del values
    assert torch.cuda.memory_reserved() - before == BYTES


def test_what_a_generator_makes_is_there_for_whoever_asks(device):
    """As vLLM asks: the next tensor on another stream than the last, and all of them read late."""
    closed = []

    def made():
        try:
            for number in range(12):
                torch.cuda._sleep(LONG // 20)
                yield str(number), torch.full((BYTES // 4,), number, dtype=torch.uint8, device=device)
        finally:
            closed.append(torch.cuda.current_stream())

    home, streams, seen = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in range(2)], []
    tensors = on_one_stream(made(), home)
    for number in range(10):
        with torch.cuda.stream(streams[number % 2]):
            name, tensor = next(tensors)
            torch.cuda._sleep(LONG // 5)
            seen.append(tensor.clone())
            del tensor
        assert name == str(number) and torch.cuda.current_stream() == home
    tensors.close()
    torch.cuda.synchronize()
    assert closed == [home]
    assert [(int(each.min()), int(each.max())) for each in seen] == [(number, number) for number in range(10)]
