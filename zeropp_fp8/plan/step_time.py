"""From bytes to seconds.

A pass (forward or backward) takes every block through two stages: the wire (gather it; when going backward also reduce
the gradients of the block before) and the GPU with its host (compute it). For n equal blocks the two-stage pipeline
takes one block on the wire, n - 1 times the slower stage, and one block on the GPU:

    pass = max(wire, busy) + min(wire, busy) / n       and wire + busy where nothing overlaps (`overlap` 0)

Forward and backward do not overlap, and the optimizer waits for the last gradient:

    step = forward + backward + optimizer
    computing = operations / rate - operations of FP8 products * (1 / rate of 16 bits - 1 / rate of FP8)
    busy = max(computing + quantizing, host)           one third of the host's time is the forward pass
    wire = bytes a node sends / link rate  and  bytes a GPU sends / rate within the node, at once (ring) or in turn
           + hops a collective * latency of a hop * collectives

Not modelled: contention of NCCL kernels with computing, stragglers, network congestion, data loading.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from zeropp_fp8.plan.hardware import MICRO, Hardware
from zeropp_fp8.plan.job import BYTES_16BIT, GBIT, Job, PlanError
from zeropp_fp8.plan.memory import MemoryEstimate, memory_per_gpu
from zeropp_fp8.plan.methods import Method
from zeropp_fp8.plan.traffic import Traffic

FORWARD_SHARE = 1 / 3  # of computing and of the host's work: the backward pass does twice as much
WIRE_INTER, WIRE_INTRA, LATENCY = "wire between nodes", "wire in the node", "latency"
COMPUTE, QUANTIZING, HOST = "compute", "quantizing", "host"
FP32_BYTES = 4


@dataclass(frozen=True)
class PassTime:
    """One pass over the model, in seconds; `parts` are the times of its resources alone."""

    seconds: float
    parts: dict[str, float]
    bound: str


class Estimate:
    """An estimate of a step, or of another unit of work: `method`, `memory`, `bound`, and
    `inter_bytes`, sent by a node to other nodes."""

    unit = "a step"
    DERIVED = ("step_s", "peak_bytes", "held_bytes")

    @property
    def peak_bytes(self) -> float:
        return self.memory.peak

    @property
    def held_bytes(self) -> float:
        return self.memory.held


@dataclass(frozen=True)
class StepEstimate(Estimate):
    """One optimizer step of one method.

    Attributes:
        forward_s, backward_s: all micro-batches of the step.
        inter_bytes: sent by a node to other nodes; intra_bytes: sent by a GPU within its node.
        bound: the resource that sets most of the step's time.
    """

    method: str
    forward_s: float
    backward_s: float
    optimizer_s: float
    tokens_per_s: float
    inter_bytes: float
    intra_bytes: float
    bound: str
    memory: MemoryEstimate

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


def overlapped(wire: float, busy: float, blocks: int, overlap: float = 1.0) -> float:
    """Seconds of a two-stage pipeline over `blocks` equal blocks; see the top of this file."""
    hidden = overlap * (1 - 1 / blocks)
    return max(wire, busy) + (1 - hidden) * min(wire, busy)


def wire_parts(traffic: Traffic, collectives: int, job: Job, hardware: Hardware) -> dict[str, float]:
    """Seconds each link needs for `traffic`, cut into `collectives` messages."""
    inter_rate = job.cluster.inter_gbit * GBIT * hardware.link_efficiency
    hops = traffic.net_hops * hardware.net_latency_us + traffic.node_hops * hardware.node_latency_us
    return {
        WIRE_INTER: traffic.inter / inter_rate if traffic.inter else 0.0,
        WIRE_INTRA: traffic.intra / (hardware.intra_gbs * 1e9),
        LATENCY: hops * MICRO * collectives,
    }


def _wire_seconds(traffic: Traffic, parts: dict[str, float]) -> float:
    links = (parts[WIRE_INTER], parts[WIRE_INTRA])
    return (max(links) if traffic.at_once else sum(links)) + parts[LATENCY]


@functools.lru_cache
def codec_bytes(method: Method, job: Job) -> tuple[float, float]:
    """Memory traffic of quantizing and dequantizing on one GPU, (forward, backward), bytes, in fused passes.

    Weights: read the 16-bit shard, write its codes; read all codes, write all weights in 16 bits, once a pass.
    Frozen weights that are stored as codes, or whose copies stay from step to step, are encoded no more. One rank alone
    sends nothing and only decodes what is stored as codes.
    Weight differences, once per step: read the shard and its old copy twice, write them; read them and the
    copies, write the copies.
    Gradients: read 16 bits, write codes; read the node's contributions, write their mean as codes; read the nodes'
    contributions, write the fp32 mean. In one exchange there is no second encoding. Residuals are read and written.
    """
    total, world, per_node = job.trained_parameters, job.cluster.world_size, job.cluster.ranks_per_node
    forward = backward = 0.0
    gathered = 1 - method.kept_parameters(job) / job.all_parameters
    for part, copied in method.copied(job):
        if part.code_bytes is None and (world == 1 or not method.quantizes_weights):
            continue
        one = (part.code_bytes or method.weight_bytes) + BYTES_16BIT
        if part.code_bytes is None:
            from_copy = copied if part.frozen and method.later_from_secondary else 0.0
            forward += (1 - from_copy) * one * part.numel / world
        forward += one * part.numel
        backward += one * part.numel * gathered
    sharing = method.copy_ranks(job.cluster)
    if method.difference_of and sharing is not None:
        # A rank makes its payload and reads it beside the old one, twice, and copies it once. It adds the others'.
        sent, difference = method.weight_bytes, method.difference_bytes(job)
        own, added = 2 * BYTES_16BIT + 8 * sent + difference, 2 * sent + difference
        differing = sum(share * part.numel for part, share in method.copied(job) if not part.frozen)
        forward += (own / world + added * (1 / sharing - 1 / world)) * differing / job.micro_batches
    if method.quantizes_gradients and world > 1:
        intra, inter = method.gradient_intra, method.gradient_inter
        backward += (BYTES_16BIT + intra + 2 * method.residual_bytes) * total
        if method.reduce == "two-level":
            backward += intra * total + inter * total / per_node
        else:
            per_node = 1
        backward += inter * total / per_node + FP32_BYTES * total / world
    return forward, backward


@functools.lru_cache
def cast_bytes(method: Method, job: Job) -> tuple[float, float]:
    """Memory traffic of casting what the blocks' linear layers multiply, (forward, backward), bytes; checkpointing adds
    the former to the latter.

    Inputs forward (one cast for q, k, v and one for gate, up), gradients of outputs backward, and weights, of which
    each pass makes the layout that it needs. Weights that arrive as codes are multiplied as they are.
    """
    model = job.model
    hidden, intermediate = model.hidden, model.intermediate
    weights = 0.0 if method.weight_bytes == 1 else (model.parameters - model.embedding_parameters) / 2
    one_layer = job.tokens * model.layers
    forward = one_layer * (3 * hidden + intermediate) + weights
    backward = one_layer * (5 * hidden + 2 * intermediate) + weights
    return method.cast_bytes * forward, method.cast_bytes * backward


def host_seconds(method: Method, job: Job, hardware: Hardware) -> float:
    """Python and launches of one micro-batch, forward and backward."""
    share = 1 + (hardware.adapter_host * job.lora.in_block(job.model) if job.lora else 0)
    share += hardware.fp8_host if method.cast_bytes else 0
    if method.compiled:
        share *= hardware.compiled_fp8_host if method.cast_bytes else hardware.compiled_host
    share += hardware.reducer_host if method.reduces_by_tensor else 0
    blocks = job.model.layers * share * (1 if method.deepspeed else hardware.fsdp_host)
    if method.host_by_tensor:
        blocks += job.model.tensors * hardware.tensor_host + method.gathers(job) * hardware.gather_host
    return blocks * hardware.host_per_block_ms / 1e3


def computing_seconds(method: Method, flop: float, block_flop: float, hardware: Hardware) -> float:
    """The GPU's matrix products and what is between them: all operations in 16 bits, less what products of the blocks
    (`block_flop` operations of `flop`) save in FP8. What is between products takes as long."""
    rate = hardware.achieved_tflops / (hardware.compiled_compute if method.compiled else 1)
    seconds = flop / rate
    if method.fp8_products:
        # Products are no slower than all of the step, whatever rate is given or fitted.
        in_16_bits = block_flop / max(rate, hardware.matrix_tflops)
        seconds -= in_16_bits * (1 - hardware.matrix_tflops / hardware.fp8_tflops)
    return seconds / 1e12


def quantizing_seconds(num_bytes: float, hardware: Hardware) -> float:
    return num_bytes / (hardware.memory_gbs * 1e9 * hardware.codec_efficiency)


def _pass_time(wire: float, parts: dict[str, float], blocks: int, overlap: float) -> PassTime:
    gpu = parts[COMPUTE] + parts[QUANTIZING]
    busy = max(gpu, parts[HOST])
    if wire > busy:
        candidates = (WIRE_INTER, WIRE_INTRA, LATENCY)
    else:
        candidates = (COMPUTE, QUANTIZING) if gpu > parts[HOST] else (HOST,)
    return PassTime(overlapped(wire, busy, blocks, overlap), parts, max(candidates, key=parts.__getitem__))


def forward_pass(method: Method, job: Job, hardware: Hardware, first: bool) -> PassTime:
    """A pass of a step, or an evaluation; `first`: no copies of the weights as they are now are there."""
    traffic = method.forward_traffic(job, first)
    parts = wire_parts(traffic, method.gathers(job), job, hardware)
    wire = _wire_seconds(traffic, parts)
    parts[COMPUTE] = computing_seconds(method, job.forward_flop, job.model.block_flop(job.tokens), hardware)
    parts[QUANTIZING] = quantizing_seconds(codec_bytes(method, job)[0] + cast_bytes(method, job)[0], hardware)
    parts[HOST] = host_seconds(method, job, hardware) * FORWARD_SHARE
    return _pass_time(wire, parts, job.model.units, hardware.overlap)


def _backward(method: Method, job: Job, hardware: Hardware, last: bool) -> PassTime:
    weights, gradients = method.backward_traffic(job), method.gradient_traffic(job, last)
    gather = wire_parts(weights, method.gathers(job), job, hardware)
    reduce = wire_parts(gradients, job.model.units, job, hardware)
    wire = _wire_seconds(weights, gather) + _wire_seconds(gradients, reduce)
    parts = {name: gather[name] + reduce[name] for name in gather}
    again = 1 if job.checkpointing else 0  # the forward pass
    flop, block_flop = job.backward_flop + again * job.forward_flop, (2 + again) * job.model.block_flop(job.tokens)
    parts[COMPUTE] = computing_seconds(method, flop, block_flop, hardware)
    casts_forward, casts = cast_bytes(method, job)
    parts[QUANTIZING] = quantizing_seconds(codec_bytes(method, job)[1] + casts + again * casts_forward, hardware)
    parts[HOST] = host_seconds(method, job, hardware) * (1 + (again - 1) * FORWARD_SHARE)
    return _pass_time(wire, parts, job.model.units, hardware.overlap)


def optimizer_seconds(method: Method, job: Job, hardware: Hardware) -> float:
    """The update is bound by memory: bytes per trained parameter of the shard over the copy bandwidth."""
    shard = job.trained_parameters / method.state_ranks(job)
    return shard * getattr(hardware, f"{method.update}_bytes") / (hardware.memory_gbs * 1e9)


def estimate(method: Method, job: Job, hardware: Hardware, copied: bool = False) -> StepEstimate:
    """Time, bytes and memory of one optimizer step; `copied`: an evaluation since the last has filled the copies."""
    method.check(job)
    if job.model.parameters < job.cluster.world_size:
        raise PlanError(
            f"{method.name}: {job.cluster.world_size} ranks cannot share {job.model.parameters:g} parameters; "
            f"give at least one parameter a rank"
        )
    repeats = job.micro_batches
    first, last = forward_pass(method, job, hardware, first=not copied), _backward(method, job, hardware, last=True)
    later, earlier = first, last  # in a step of one micro-batch they are not there
    if repeats > 1:
        later, earlier = forward_pass(method, job, hardware, first=False), _backward(method, job, hardware, last=False)
    optimizer = optimizer_seconds(method, job, hardware)
    forward_s = first.seconds + (repeats - 1) * later.seconds
    backward_s = (repeats - 1) * earlier.seconds + last.seconds

    time_bound_by: dict[str, float] = {"optimizer": optimizer}
    for one, times in ((first, 1), (later, repeats - 1), (earlier, repeats - 1), (last, 1)):
        time_bound_by[one.bound] = time_bound_by.get(one.bound, 0.0) + times * one.seconds

    once = (method.forward_traffic(job, first=not copied), method.gradient_traffic(job), method.backward_traffic(job))
    again = (method.forward_traffic(job, first=False), method.gradient_traffic(job, last=False), once[-1])

    def moved(link: str) -> float:
        one, further = (sum(getattr(traffic, link) for traffic in each) for each in (once, again))
        return one + (repeats - 1) * further

    return StepEstimate(
        method=method.name,
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer,
        tokens_per_s=repeats * job.tokens / (forward_s + backward_s + optimizer),
        inter_bytes=moved("inter"),
        intra_bytes=moved("intra"),
        bound=max(time_bound_by, key=time_bound_by.__getitem__),
        memory=memory_per_gpu(method, job),
    )
