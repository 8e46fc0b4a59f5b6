"""All-to-all of activations in FP8, for sequence parallelism and expert parallelism.

Sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509) keeps a part of the sequence on each rank. Around attention
an all-to-all exchanges it for the whole sequence of some heads, and back. Expert parallelism sends tokens to the ranks
that have their experts, and the experts' outputs back. As in FP8-LM (arXiv 2310.18313, section 2.3) they are sent in
FP8: E4M3 in the forward pass, and gradients as E5M2, which has a wider range. NaN and Inf arrive as NaN in all elements
that share their scale: the values of one token that are sent to one rank. A tensor has one scale per 128 elements
instead if its tokens are not consecutive, or are too short or too long for a scale each.

Codes and scales are in one flat uint8 buffer (gloo refuses FP8 tensors); each direction takes one collective:

    bytes to a rank = align16(2 * blocks) + align16(n)  against  2 * n    for n elements in ceil(n / block) blocks
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp_fp8.comm.issue import timed
from zeropp_fp8.comm.lanes import used_last
from zeropp_fp8.comm.ledger import OUTSIDE, STOCK_BYTES_PER_ELEMENT, WireLedger
from zeropp_fp8.comm.objects import gather_objects
from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.comm.topology import INTER, INTRA
from zeropp_fp8.formats import make_format

FORWARD_FORMAT, BACKWARD_FORMAT = "fp8_e4m3", "fp8_e5m2"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_SIZE = 128
# A scale has 2 bytes: 3 % of the 64 codes of the shortest token that has one. Kernels keep a whole block in registers.
SHORTEST_TOKEN, LONGEST_TOKEN = 64, 16384
# A layout is small (tables of a few numbers), but sequences of varying length need ever new layouts.
_MOST_LAYOUTS = 256
_MOST_ROWS = 32768  # of a launch, whose grid CUDA bounds by 65,535


class ActivationExchange:
    """FP8 all-to-all of the activations of one model, over any process groups.

    Args:
        node: this rank's node: any value that the ranks of the node alone share. The ranks of a group exchange it when
            the group's route is made; it decides which link bytes belong to.
        ledger: it counts the bytes, as kind "activations".
        block_size: elements that share a scale; None: those of a token (see above).
        use_kernels: Triton kernels instead of torch operations; None: on a GPU.

    Attributes:
        off: all tensors are sent unquantized for now, in compiled graphs too.
    """

    off = False

    def __init__(
        self,
        node: Hashable,
        ledger: WireLedger | None = None,
        block_size: int | None = None,
        use_kernels: bool | None = None,
    ) -> None:
        self._node = node
        self._ledger = ledger
        self._block_size = block_size
        self._use_kernels = use_kernels
        self._layouts: dict[tuple, PayloadLayout | SliceOrder] = {}
        self._routes: dict[str, Route] = {}

    def route(self, group: dist.ProcessGroup | None = None) -> Route:
        """Return the route over `group` (None: the world). Making it is collective; make it before torch.compile."""
        group = dist.group.WORLD if group is None else group
        found = self._routes.get(group.group_name)
        if found is None:
            found = self._routes[group.group_name] = Route(self, group)
        return found

    def accepts(self, tensor: Tensor, size: int, splits: Sequence[int] | None = None) -> bool:
        """Whether a tensor for `size` ranks is sent in FP8. All ranks of an exchange come to the same answer.

        These are not: integers and booleans (position ids, masks), fp64, empty tensors, those for one rank only, those
        so small that padding makes them no smaller than 16 bits, and all while the exchange is off.
        """
        if self.off or size == 1 or tensor.dtype not in DTYPES:
            return False
        if splits is not None:
            return True  # shares differ from rank to rank, so their size must not decide
        if tensor.numel() == 0:
            return False
        numel = tensor.numel() // size
        payload_bytes = self._layout(numel, self.block_size_of(tensor), tensor, size, False)[0].row_bytes
        return payload_bytes < numel * STOCK_BYTES_PER_ELEMENT

    def block_size_of(self, tensor: Tensor, splits: Sequence[int] | None = None) -> int:
        """Elements per scale of `tensor`, [ranks, sequence, batch, heads, head_dim] or [.., heads * head_dim].

        The first dimension is the receiving rank, the next two (in any order) say which token, the others are in it.
        With two dimensions and `splits`, a row is a token on its way to an expert, or back.
        """
        if self._block_size is not None:
            return self._block_size
        token = math.prod(tensor.shape[3:]) if tensor.dim() > 3 else tensor.shape[-1]
        of_tokens = splits is None or tensor.dim() == 2
        return token if of_tokens and SHORTEST_TOKEN <= token <= LONGEST_TOKEN else BLOCK_SIZE

    def _layout(
        self, numel: int, block_size: int, tensor: Tensor, rows: int, backward: bool
    ) -> tuple[PayloadLayout, SliceOrder]:
        """Return the layout that turns `rows` ranks' shares of `numel` elements into payload rows and back."""

        def make() -> PayloadLayout:
            wire_format = make_format(BACKWARD_FORMAT if backward else FORWARD_FORMAT, block_size=block_size)
            return PayloadLayout([numel], [wire_format], [tensor.dtype], device, use_kernels=self._use_kernels)

        device = tensor.device
        layout = self._kept((numel, block_size, tensor.dtype, device, backward), make)
        return layout, self._kept((rows, device), lambda: SliceOrder(range(rows), device))

    def _kept(self, key: tuple, make: Callable[[], Any]) -> Any:
        if key not in self._layouts:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = make()
        return self._layouts[key]

    @torch.no_grad()
    def start(
        self,
        output: Tensor,
        input: Tensor,
        group: dist.ProcessGroup | None = None,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        backward: bool = False,
        evaluating: bool = False,
    ) -> PendingExchange:
        """Encode and send `input`; wait() completes `output`.

        Args:
            output: contiguous tensor of input's dtype; it is written.
            input: contiguous fp32, bf16 or fp16 tensor.
            group: the ranks; None: the world.
            output_splits, input_splits: rows (of the first dimension) from and for each rank; None: equal shares.
            backward: the tensors are gradients, so they are sent as E5M2.
            evaluating: count the bytes as outside of steps.

        Raises:
            ValueError: a tensor is not contiguous, or the dtypes differ.
        """
        group = dist.group.WORLD if group is None else group
        if not (input.is_contiguous() and output.is_contiguous()) or input.dtype != output.dtype:
            raise ValueError("an FP8 all-to-all needs contiguous tensors of one dtype")
        size = dist.get_world_size(group)
        even = output_splits is None and input_splits is None
        block_size = self.block_size_of(input, None if even else ())
        sent = self._shares(input, size, input_splits, block_size, backward)
        received = self._shares(output, size, output_splits, block_size, backward)
        outgoing, incoming = sent.new_payload(), received.new_payload()
        sent.encode(outgoing)
        sizes = (None, None) if even else (received.bytes_per_rank, sent.bytes_per_rank)
        route = self.route(group)
        where, arguments = f"of activations ({size} ranks)", (incoming, outgoing, *sizes)
        abroad = sum(n for link, n in zip(route.links, sent.bytes_per_rank) if link is not None)
        link = INTER if INTER in route.links else INTRA
        work = timed(self._ledger, dist.all_to_all_single, arguments, group, True, link, where, abroad)
        self._count(route, sent.bytes_per_rank, sent.numel_per_rank, evaluating)
        return PendingExchange(work, received, incoming, outgoing)

    def count_whole(
        self, tensor: Tensor, group: dist.ProcessGroup | None, splits: Sequence[int], evaluating: bool
    ) -> None:
        """Count a tensor that goes as it is, so many rows to each rank."""
        numels = [rows * (tensor.numel() // max(1, tensor.shape[0])) for rows in splits]
        self._count(self.route(group), [numel * tensor.element_size() for numel in numels], numels, evaluating)

    def _shares(self, tensor: Tensor, size: int, splits, block_size: int, backward: bool) -> _Shares:
        if splits is None:
            numel = tensor.numel() // size
            parts = [(tensor, numel, size, *self._layout(numel, block_size, tensor, size, backward))]
        elif tensor.dim() == 2 and block_size == tensor.shape[1]:  # a row per token: their number is ever new
            numel, several = tensor.shape[1], tensor.split(_MOST_ROWS)
            parts = [
                (part, numel, len(part), *self._layout(numel, numel, part, len(part), backward)) for part in several
            ]
            return _Shares(parts, splits)
        else:
            row_numel = tensor.numel() // max(1, tensor.shape[0])
            parts = [
                (part, part.numel(), 1, *self._layout(rows * row_numel, block_size, tensor, 1, backward))
                for rows, part in zip(splits, tensor.split(list(splits)))
            ]
        return _Shares(parts)

    def _count(self, route: Route, sent: Sequence[int], numels: Sequence[int], evaluating: bool) -> None:
        if self._ledger is None:
            return
        with self._ledger.counting(OUTSIDE if evaluating else "activations"):
            for link, num_bytes, numel in zip(route.links, sent, numels):
                if link is not None:
                    self._ledger.sent(link, num_bytes)
                    self._ledger.stock_would_send_over(link, numel)


class _Shares:
    """A tensor cut into the shares of the ranks.

    Equal shares are rows of one part. Unequal shares are a part each, or, with `splits`, so many rows of the parts.
    """

    def __init__(
        self, parts: list[tuple[Tensor, int, int, PayloadLayout, SliceOrder]], splits: Sequence[int] | None = None
    ) -> None:
        self._parts = parts
        self.tensors = [tensor for tensor, *_ in parts]
        if splits is None:
            shares = [(1, numel, layout.row_bytes) for _, numel, rows, layout, _ in parts for _ in range(rows)]
        else:
            _, numel, _, layout, _ = parts[0]
            shares = [(count, numel, layout.row_bytes) for count in splits]
        self.numel_per_rank = [count * numel for count, numel, _ in shares]
        self.bytes_per_rank = [count * row_bytes for count, _, row_bytes in shares]

    def new_payload(self) -> Tensor:
        """Return a flat uint8 buffer for all shares, rank after rank."""
        return torch.empty(sum(self.bytes_per_rank), dtype=torch.uint8, device=self._parts[0][0].device)

    def _with_payload(self, payload: Tensor):
        pieces = payload.split([rows * layout.row_bytes for _, _, rows, layout, _ in self._parts])
        for (tensor, _, rows, layout, order), piece in zip(self._parts, pieces):
            if rows:  # no token may go to a rank
                yield layout, [tensor], order, piece.view(rows, layout.row_bytes)

    def encode(self, payload: Tensor) -> None:
        for layout, tensors, order, rows in self._with_payload(payload):
            layout.encode(tensors, order, rows)

    def decode(self, payload: Tensor) -> None:
        for layout, tensors, order, rows in self._with_payload(payload):
            layout.decode(rows, order, tensors)


class PendingExchange:
    """An exchange under way; it takes the place of the handle of an asynchronous collective in DeepSpeed."""

    def __init__(self, work: dist.Work, received: _Shares, incoming: Tensor, outgoing: Tensor) -> None:
        self._work: dist.Work | None = work
        self._received, self._incoming, self._outgoing = received, incoming, outgoing

    def wait(self) -> None:
        """Make the current stream (on a CPU: the caller) wait for the codes, and write the output."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._received.decode(self._incoming)
            # The waiting stream may not be the one that has made these (Ulysses may have a stream of its own). That
            # stream has not waited, and the allocator would give their memory away.
            for buffer in (self._incoming, self._outgoing, *self._received.tensors):
                used_last(buffer)
            del self._received, self._incoming, self._outgoing


_number = itertools.count()
_routes: weakref.WeakValueDictionary[str, Route] = weakref.WeakValueDictionary()


class Route:
    """An exchange over one process group. Operators take its name, because their arguments are plain values."""

    def __init__(self, exchange: ActivationExchange, group: dist.ProcessGroup) -> None:
        self.exchange = weakref.ref(exchange)
        self.group = group
        self.size = dist.get_world_size(group)
        nodes = gather_objects(exchange._node, group)
        self.links = [INTRA if node == exchange._node else INTER for node in nodes]
        self.links[dist.get_rank(group)] = None
        self.name = f"{group.group_name}/{next(_number)}"
        _routes[self.name] = self


def fp8_all_to_all(
    input: Tensor, exchange: ActivationExchange, group: dist.ProcessGroup | None = None, evaluating: bool = False
) -> Tensor:
    """All-to-all along the first dimension: input[r] goes to rank r, output[r] comes from it. Differentiable.

    Its gradient is the same exchange in E5M2; rounding counts as the identity. It is an operator of torch, so that
    torch.compile sees one step with a known derivative. A tensor that `exchange` does not accept is sent as it is.

    Args:
        input: [ranks of the group, ...]; floating point is sent as E4M3.
        group: the ranks; None: the world.
        evaluating: count the bytes as outside of steps.

    Returns:
        The same shape and dtype.

    Raises:
        ValueError: the first dimension is not the number of ranks.
    """
    route = exchange.route(group)
    if input.shape[0] != route.size:
        raise ValueError(f"the first dimension is {input.shape[0]}, the group has {route.size} ranks")
    return _all_to_all(input.contiguous(), route.name, False, evaluating)


@torch.library.custom_op("zeropp_fp8::activation_all_to_all", mutates_args=())
def _all_to_all(input: Tensor, route_name: str, backward: bool, evaluating: bool) -> Tensor:
    route = _routes.get(route_name)
    exchange = None if route is None else route.exchange()
    if exchange is None:
        raise RuntimeError("the engine whose activations these are is gone; run backward before destroying it")
    output = torch.empty_like(input)
    if exchange.accepts(input, route.size):
        exchange.start(output, input, route.group, backward=backward, evaluating=evaluating).wait()
    else:
        dist.all_to_all_single(output, input, group=route.group)
    return output


@_all_to_all.register_fake
def _(input: Tensor, route_name: str, backward: bool, evaluating: bool) -> Tensor:
    return torch.empty_like(input)


def _keep_route(ctx, inputs, output) -> None:
    _, ctx.route_name, _, ctx.evaluating = inputs


def _exchange_gradient(ctx, grad_output: Tensor):
    return _all_to_all(grad_output.contiguous(), ctx.route_name, True, ctx.evaluating), None, None, None


_all_to_all.register_autograd(_exchange_gradient, setup_context=_keep_route)
