"""A CUDA graph on a CPU: operators that are recorded once with their tensors, and repeated on them.

What a graph does not see is not seen here either: numbers that Python knew when it was recorded stay as they were.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recording(TorchDispatchMode):
    """Operators in the order in which they are called, with their arguments and results."""

    def __init__(self):
        super().__init__()
        self.calls, self.written = [], []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operator is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for argument, value in zip(operator._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written += [(value, value.clone())]
        results = operator(*args, **kwargs)
        self.calls.append((operator, args, kwargs, results))
        return results

    def undo(self):
        """Give back what was written to: nothing is computed while a graph is recorded."""
        for tensor, before in reversed(self.written):
            tensor.copy_(before)
        self.written.clear()

    @torch.no_grad()
    def replay(self):
        for operator, args, kwargs, results in self.calls:
            for before, now in zip(tree_leaves(results), tree_leaves(operator(*args, **kwargs))):
                if isinstance(now, torch.Tensor) and now.data_ptr() != before.data_ptr():
                    before.copy_(now)


def recorded(step):
    """As `zeropp_fp8.zero.generation.replayed.recorded`."""
    recording = Recording()
    with recording:
        outputs = step()
    recording.undo()
    return recording.replay, outputs
