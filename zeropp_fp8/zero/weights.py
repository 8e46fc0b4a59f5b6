"""Gathering parameters: quantized once, two-level, with the node's copy kept as received codes.

DeepSpeed puts `all_gather`, `all_gather_coalesced` and `partition` on each ZeRO-3 parameter as closures; `adopt()`
replaces them. Two kinds of gather exist:

* for computing (`all_gather_coalesced`, and `all_gather()` while a module runs): the configured wire format. The
  shard's payload is encoded once and cached until the weights change, so forward, backward, every micro-batch and
  evaluation see the same bits, also with stochastic rounding. With hpZ the payloads received in the first hops are
  kept (the secondary shard): later gathers use the node's own links only.
* for looking and changing (`GatheredParameters` and everything built on it): every bit, in two levels too.

Payloads and secondary shards are dropped by `weights_changed()`, which every writer of weights calls on every rank:
the optimizer step, checkpoint loads, `partition(has_been_updated=True)`. All ranks therefore agree on who holds what;
looking at a tensor's version counter instead would let them disagree (a padded shard is never written) and hang.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, get_allgather_dtype
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.comm.all_gather import PendingGather, gather_through, start_gather
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.formats import UnquantizedFormat, WireFormat
from zeropp_fp8.zero.session import Session

STATE = "zeropp_fp8_wire"


@dataclass
class NodeCopy:
    """What a rank holds after the first hops for one group of parameters: flat uint8 [ranks reached * bytes]."""

    held: Tensor
    payload_bytes: int
    parameter_ids: tuple[int, ...]


@dataclass
class ParameterWire:
    """The plugin's state of one parameter."""

    stock_all_gather: object
    stock_all_gather_coalesced: object
    stock_partition: object
    payload: Tensor | None = None  # uint8, this rank's shard in the wire format
    node_copy: NodeCopy | None = None  # where its codes are kept (hpZ) ...
    node_offset: int = 0  # ... and at which byte of each payload
    lossy: bool = False  # param.data came through a quantized format


class GatherHandle:
    """One gather under way; `wait` makes the parameters available."""

    def __init__(self, gatherer: WeightGatherer, parameters: Sequence[Parameter], pending: PendingGather) -> None:
        self._gatherer = gatherer
        self._parameters = parameters
        self._pending: PendingGather | None = pending

    def wait(self, handle_dependency: bool = True) -> None:
        """`handle_dependency` is DeepSpeed's; buffers are always protected here."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._gatherer.decode_into(self._parameters, pending.wait())


class SeveralHandles:
    """Handles that are waited for together."""

    def __init__(self, handles: Sequence) -> None:
        self._handles = handles

    def wait(self, handle_dependency: bool = True) -> None:
        for handle in self._handles:
            handle.wait(handle_dependency=handle_dependency)


class WeightGatherer:
    """Gathers the parameters of one engine."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.adopted: dict[int, Parameter] = {}
        self.module_depth = 0  # > 0 while a module of the model runs
        self.stream = None  # the stream gathers run on; set by the offload object, None on synchronous devices
        self._weights_ready = None  # device event: the last write to the weights

    # -- adoption ------------------------------------------------------------------------------------------------

    def adopt(self, parameters: Iterable[Parameter]) -> None:
        """Put this gatherer's closures on ZeRO-3 parameters that do not have them yet."""
        for param in parameters:
            if param.ds_id in self.adopted:
                continue
            previous = getattr(param, STATE, None)  # another engine's, over the same parameter
            setattr(
                param,
                STATE,
                ParameterWire(
                    stock_all_gather=previous.stock_all_gather if previous else param.all_gather,
                    stock_all_gather_coalesced=(
                        previous.stock_all_gather_coalesced if previous else param.all_gather_coalesced
                    ),
                    stock_partition=previous.stock_partition if previous else param.partition,
                ),
            )
            param.all_gather_coalesced = self.all_gather_coalesced
            param.all_gather = self._all_gather_closure(param)
            param.partition = self._partition_closure(param)
            self.adopted[param.ds_id] = param

    def release(self) -> None:
        """Give every parameter DeepSpeed's own closures back."""
        for param in self.adopted.values():
            state: ParameterWire = getattr(param, STATE)
            if state.lossy:
                param.partition()
            param.all_gather = state.stock_all_gather
            param.all_gather_coalesced = state.stock_all_gather_coalesced
            param.partition = state.stock_partition
            delattr(param, STATE)
        self.adopted.clear()

    def _all_gather_closure(self, param: Parameter):
        def all_gather(param_list=None, async_op=False, hierarchy=0):
            if param_list is None and self.module_depth > 0:
                return self.gather_now([param])
            return self.gather_exactly([param] if param_list is None else list(param_list), async_op, hierarchy)

        return all_gather

    def _partition_closure(self, param: Parameter):
        def partition(param_list=None, hierarchy=0, has_been_updated=False, free_data=True):
            params = [param] if param_list is None else list(param_list)
            if has_been_updated:
                self._count_update(params)
                self.weights_changed(params)
            for p in params:
                state = getattr(p, STATE)
                state.stock_partition([p], hierarchy=hierarchy, has_been_updated=has_been_updated, free_data=free_data)
                state.lossy = False

        return partition

    # -- formats -------------------------------------------------------------------------------------------------

    def format_of(self, param: Parameter) -> WireFormat:
        """The wire format of a parameter: matrices as configured, vectors and scalars in their own 16 or 32 bits."""
        if len(param.ds_shape) >= 2:
            chosen = self.session.weight_format if param.requires_grad else self.session.frozen_format
            if chosen is not None:
                return chosen
        return UnquantizedFormat(get_allgather_dtype(param, param.ds_tensor))

    def _payload_of(self, param: Parameter) -> Tensor:
        state: ParameterWire = getattr(param, STATE)
        if state.payload is None:
            shard = param.ds_tensor.data.to(self.session.device, non_blocking=True)
            payload = self.format_of(param).encode(shard, self.session.generators["weights"])
            if self.session.weight_format is None and self.session.frozen_format is None:
                return payload  # a copy of the shard itself: nothing to gain from keeping it
            state.payload = payload
        return state.payload

    # -- gathers -------------------------------------------------------------------------------------------------

    def all_gather_coalesced(self, params: Iterable[Parameter], safe_mode: bool = False, quantize: bool = False):
        """Start gathering `params` (none of them available) for computing; returns a handle with wait().

        `safe_mode` and `quantize` are DeepSpeed's; the session decides the format.
        """
        params = sorted(params, key=lambda p: p.ds_id)
        for param in params:
            if param.ds_status != ZeroParamStatus.NOT_AVAILABLE:
                raise RuntimeError(f"cannot gather a parameter that is {param.ds_summary()}")
            param.ds_status = ZeroParamStatus.INFLIGHT
        self._wait_for_weights()
        groups = [[p] for p in params] if self.session.config.gather_granularity == "parameter" else [params]
        handles = []
        for group in groups:
            # Parameters with a copy in the node and those without differ in the hops they take.
            for members in ([p for p in group if self._in_node(p)], [p for p in group if not self._in_node(p)]):
                if members:
                    handles.append(self._start(members))
        return handles[0] if len(handles) == 1 else SeveralHandles(handles)

    def _in_node(self, param: Parameter) -> bool:
        return getattr(param, STATE).node_copy is not None

    def _start(self, params: list[Parameter]) -> GatherHandle:
        before, after = self.session.gather_levels
        ledger = self.session.ledger
        ledger.stock_would_send(sum(p.ds_tensor.ds_numel for p in params) * self.session.topology.world_size)
        if self._in_node(params[0]):
            held, payload_bytes = self._from_node_copies(params)
        else:
            payloads = [self._payload_of(p) for p in params]
            payload = payloads[0] if len(payloads) == 1 else torch.cat(payloads)
            payload_bytes = payload.numel()
            held = gather_through(payload, before, ledger)
            if self.session.secondary_ranks is not None:
                self._keep(params, payloads, NodeCopy(held, payload_bytes, tuple(p.ds_id for p in params)))
        return GatherHandle(self, params, start_gather(held, before, after, payload_bytes, ledger))

    def _keep(self, params: list[Parameter], payloads: list[Tensor], copy: NodeCopy) -> None:
        offset = 0
        for param, payload in zip(params, payloads):
            state: ParameterWire = getattr(param, STATE)
            state.node_copy, state.node_offset = copy, offset
            offset += payload.numel()

    def _from_node_copies(self, params: list[Parameter]) -> tuple[Tensor, int]:
        """(held, payload bytes) for a group: the kept buffer itself when it holds exactly this group."""
        first: NodeCopy = getattr(params[0], STATE).node_copy
        if first.parameter_ids == tuple(p.ds_id for p in params):
            return first.held, first.payload_bytes
        parts = []
        for param in params:
            state: ParameterWire = getattr(param, STATE)
            size = self.format_of(param).payload_bytes(param.ds_tensor.ds_numel)
            rows = state.node_copy.held.view(-1, state.node_copy.payload_bytes)
            parts.append(rows[:, state.node_offset : state.node_offset + size])
        rows = torch.cat(parts, dim=1)
        return rows.view(-1), rows.shape[1]

    def decode_into(self, params: Sequence[Parameter], payloads: Tensor) -> None:
        """Decode uint8 [*levels, bytes] (rank order) into the parameters and mark them available."""
        self._decode(params, [self.format_of(p) for p in params], payloads)

    def _decode(self, params: Sequence[Parameter], formats: Sequence[WireFormat], payloads: Tensor) -> None:
        if payloads.is_cuda:
            # wait() may run on another stream than the one the buffer was allocated on.
            payloads.record_stream(torch.cuda.current_stream())
        world = self.session.topology.world_size
        offset = 0
        for param, wire_format in zip(params, formats):
            shard_numel = param.ds_tensor.ds_numel
            size = wire_format.payload_bytes(shard_numel)
            rows = payloads[..., offset : offset + size].reshape(world, size)
            offset += size
            flat = wire_format.decode_rows(rows, shard_numel, param.ds_tensor.dtype).view(-1)
            param.data = flat[: param.ds_numel].view(param.ds_shape)
            param.ds_status = ZeroParamStatus.AVAILABLE
            getattr(param, STATE).lossy = not isinstance(wire_format, UnquantizedFormat)

    def gather_now(self, params: Sequence[Parameter]) -> None:
        """Gather for computing, complete on the current stream; parameters that are available stay as they are."""
        missing = [p for p in params if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        if not missing:
            return
        if self.stream is None:
            self.all_gather_coalesced(missing).wait()
            return
        accelerator = get_accelerator()
        current = accelerator.current_stream()
        self.stream.wait_stream(current)
        with accelerator.stream(self.stream):
            self.all_gather_coalesced(missing).wait()
        current.wait_stream(self.stream)

    def gather_exactly(self, params: list[Parameter], async_op: bool = False, hierarchy: int = 0):
        """Gather with every bit, complete on the current stream, for looking at weights and changing them.

        A parameter that is there in quantized form is gathered again. `async_op` is left to DeepSpeed's own gather.
        """
        for param in params:
            if getattr(param, STATE).lossy and not param.ds_active_sub_modules:
                param.partition()
        if async_op:
            return getattr(params[0], STATE).stock_all_gather(params, async_op=True, hierarchy=hierarchy)
        missing = [p for p in params if p.ds_status == ZeroParamStatus.NOT_AVAILABLE]
        if missing:
            levels = self.session.topology.gather_levels()
            formats = [UnquantizedFormat(p.ds_tensor.dtype) for p in missing]
            shards = [p.ds_tensor.data.to(self.session.device) for p in missing]
            payload = torch.cat([f.encode(shard) for f, shard in zip(formats, shards)])
            with self.session.ledger.counting(OUTSIDE):
                held = gather_through(payload, levels[0], self.session.ledger)
                pending = start_gather(held, *levels, payload.numel(), self.session.ledger)
            self._decode(missing, formats, pending.wait())
        return None

    def _count_update(self, params: list[Parameter]) -> None:
        """GatheredParameters(modifier_rank=...) broadcasts each parameter before it partitions it again."""
        with self.session.ledger.counting(OUTSIDE):
            for param in params:
                self.session.ledger.sent_around_ring(param.ds_numel * param.element_size())

    # -- invalidation --------------------------------------------------------------------------------------------

    def weights_changed(self, params: Iterable[Parameter] | None = None) -> None:
        """Forget payloads and secondary shards of `params` (None: all, frozen ones too). Call it on every rank."""
        for param in self.adopted.values() if params is None else params:
            state: ParameterWire = getattr(param, STATE)
            state.payload = None
            state.node_copy = None
        if self.stream is not None:
            self._weights_ready = get_accelerator().Event()
            self._weights_ready.record(get_accelerator().current_stream())

    def _wait_for_weights(self) -> None:
        """The gather stream must not read shards before the optimizer, on the compute stream, has written them."""
        if self._weights_ready is not None:
            get_accelerator().current_stream().wait_event(self._weights_ready)

    # -- inspection ----------------------------------------------------------------------------------------------

    def secondary_bytes(self) -> int:
        """Bytes of secondary shards held by this rank now."""
        copies = {id(s.node_copy): s.node_copy for p in self.adopted.values() if (s := getattr(p, STATE)).node_copy}
        return sum(copy.held.numel() for copy in copies.values())
