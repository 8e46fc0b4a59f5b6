"""When units of gradients are reduced, in backwards of plain torch."""

import pytest
import torch
from torch import nn

from zeropp_fp8.zero.reduce.order import FixedOrder, is_still_to_come


def at_end(x, run):
    """x, and `run` called where its gradient is there: after the backward of a module whose input this is."""
    x = x.clone()
    x.register_hook(lambda grad: run())
    return x


class Order:
    """Units of one matrix each, in an order that writes down what it reduces; hooks as DeepSpeed sets them."""

    def __init__(self, count):
        torch.manual_seed(0)
        self.params = [nn.Parameter(torch.randn(3, 3)) for _ in range(count)]
        self.reduced = []  # (parameter, its gradient)
        self.order = FixedOrder([[p] for p in self.params], self._reduce)
        for param in self.params:
            param.ds_shape = param.shape
            param.register_post_accumulate_grad_hook(self.order.is_ready)

    def _reduce(self, params):
        for param in params:
            self.reduced.append((self.index(param), param.grad.clone()))
            param.grad = None

    def index(self, param):
        return next(i for i, p in enumerate(self.params) if p is param)

    def names(self):
        found = [index for index, _ in self.reduced]
        self.reduced.clear()
        return found

    def module(self, x, *used):
        """x times the matrices `used`, as a module that has them; its end is told as DeepSpeed's hooks tell it."""
        x = at_end(x, lambda: self.order.module_ended(self.params[i] for i in used))
        for index in used:
            x = x @ self.params[index]
        return x


def test_the_end_of_a_backward_sends_zeros_once():
    job = Order(3)
    job.module(torch.randn(2, 3, requires_grad=True), 1).sum().backward()
    assert job.names() == []
    job.order.finish()
    assert [bool(grad.any()) for _, grad in job.reduced] == [False, True, False] and job.names() == [0, 1, 2]
    for _ in range(2):
        job.order.finish()
    assert job.names() == [], "what has been reduced must stay"
    job.order.begin()  # a backward that brings this rank nothing
    job.order.finish()
    assert job.names() == [0, 1, 2], "the other ranks wait for this one"


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_read_early_is_waited_for(frozen):
    """The gradient of matrix 0 comes after the end of its module, and is the sum of both uses."""
    job = Order(2)
    job.params[0].requires_grad_(not frozen)
    x = torch.randn(2, 3, requires_grad=True)
    expected = None
    if not frozen:
        (expected,) = torch.autograd.grad((x @ job.params[0] @ job.params[0] @ job.params[1]).sum(), [job.params[0]])
    early = job.module(x, 1) * 0 + x @ job.params[0]  # a use that is not the module's
    job.module(early, 0).matmul(job.params[1]).sum().backward()
    job.order.finish()
    grads = dict(job.reduced)
    assert job.names() == [0, 1]
    torch.testing.assert_close(grads[0], torch.zeros(3, 3) if frozen else expected)


def test_what_a_module_does_not_use_is_sent_at_its_end():
    job = Order(2)
    reduced_at_end = []
    x = at_end(torch.randn(2, 3, requires_grad=True), lambda: reduced_at_end.extend(job.names()))
    x = at_end(x, lambda: job.order.module_ended(job.params))
    (x @ job.params[1]).sum().backward()
    assert reduced_at_end == [0, 1]


def test_a_gradient_that_is_asked_for_is_added_to_none():
    job = Order(1)
    seen = []
    x = torch.randn(2, 3, requires_grad=True)
    y = (at_end(x, lambda: seen.append(is_still_to_come(job.params[0]))) @ job.params[0]).sum()
    torch.autograd.grad(y, [x], retain_graph=True)
    torch.autograd.grad(y, [x, job.params[0]], retain_graph=True)
    y.backward()
    assert seen == [False, False, True]


def test_a_backward_that_is_forgotten():
    job = Order(2)
    job.module(torch.randn(2, 3, requires_grad=True), 0).sum().backward()
    assert job.names() == [0]
    job.order.start_again()
    job.order.finish()
    assert job.names() == []
    job.module(torch.randn(2, 3, requires_grad=True), 0, 1).sum().backward()
    assert job.names() == [0, 1]
