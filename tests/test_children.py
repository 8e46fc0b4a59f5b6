"""Processes that a script starts by `multiprocessing` have the plugin on where the script has it by zeropp_fp8.run."""

import multiprocessing

import pytest

import zeropp_fp8
from zeropp_fp8.children import enable_with_children
from zeropp_fp8.plugin import is_enabled

# Not "forkserver", which sends the same pickle: the server is one for the whole of pytest's process, and that of ranks.
CONTEXT = multiprocessing.get_context("spawn")


def enabled_here_and_below(found, below):
    found.put(is_enabled())
    if below:
        run_in_child(found)


def run_in_child(found, below=False):
    process = CONTEXT.Process(target=enabled_here_and_below, args=(found, below))
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.fixture
def leave_stock():
    before = dict(multiprocessing.current_process()._config)
    yield
    multiprocessing.current_process()._config.clear()
    multiprocessing.current_process()._config.update(before)
    zeropp_fp8.disable()


def test_a_child_and_its_child(leave_stock):
    found = CONTEXT.SimpleQueue()
    enable_with_children()
    run_in_child(found, below=True)
    assert [found.get(), found.get()] == [True, True]
