"""Rates of the machine: data sheet figures, and constants that only a measurement gives."""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeropp_fp8.plan.job import PlanError, require_at_least_zero, require_positive

MICRO = 1e-6
ABOVE_ZERO = ("intra_gbs", "memory_gbs", "achieved_tflops", "link_efficiency", "codec_efficiency")
ABOVE_ZERO += ("matrix_tflops", "fp8_tflops")
# Fields that are at most 1.
SHARES = ("link_efficiency", "codec_efficiency", "overlap", "compiled_host", "compiled_compute", "adapter_host")


@dataclass(frozen=True)
class Hardware:
    """One GPU, its host process and its links.

    From data sheets or copy benchmarks:
        intra_gbs: what a GPU sends within its node in a collective, GB/s, one way.
        memory_gbs: copy bandwidth of the GPU, GB/s, bytes read + bytes written.
        net_latency_us, node_latency_us: one hop of a ring between and within nodes, as NCCL's src/graph/tuning.cc has.
        optimizer_bytes: memory traffic of the update, bytes per parameter: fp32 AdamW reads gradient, master weight and
            two moments, writes three and the 16-bit weight, 30 in all.
        matrix_tflops, fp8_tflops: a product alone, in 16 bits and in FP8; the same where the GPU has no FP8.

    Measured, or fitted by benchmarks/plan_fit:
        achieved_tflops: TFLOP/s of a GPU in forward and backward passes, 16 bits.
        link_efficiency: share of a link's rate that the payload gets.
        host_per_block_ms: Python and kernel launches for one block, forward and backward, in eager mode.
        compiled_host, compiled_compute: shares of a block's host time and of its computing that are left when
            torch.compile runs it, which fuses what is between its matrix products.
        compiled_fp8_host: the share of its host time in FP8, whose casts torch.compile calls one by one.
        adapter_host: host time of one LoRA adapter, as a share of its block's without adapters.
        fp8_host: host time of a block's casts and scales in FP8 or MX, as a share of its block's in 16 bits.
        reducer_host: the same of DeepSpeed's own reducer, which takes gradients tensor by tensor.
        zero3_bytes, zeropp_bytes, fp8_optimizer_bytes: memory traffic of a step that tokens do not change, bytes per
            parameter of the shard: DeepSpeed's with fp32 AdamW; with 16-bit gradients of this project; and in FP8.
        fsdp_host: host time of a block of FSDP2 instead of this project's, as a share of it.
        tensor_host: what DeepSpeed's ZeRO-3 adds for each tensor it manages, as a share of a block's host time.
        gather_host: the same for each unit it gathers, releases and reduces (hooks, handles).
        codec_efficiency: share of memory_gbs that quantizing and dequantizing reach in one fused pass.
        overlap: how much of what can be hidden behind the slower of wire and GPU is hidden: 1 all of it, 0 nothing.
    """

    intra_gbs: float
    memory_gbs: float
    achieved_tflops: float
    link_efficiency: float = 0.9
    host_per_block_ms: float = 3.94
    # FSDP2 on 2 H200: 119 ms instead of 154 (two_nodes/h200-2-nvlink-compiled_zero3_linear.json in benchmarks/results);
    # kernels less the update 0.71 (step_profile/h200-1-4x2048.json). `fp8-lm`: 0.6 to 1.2 in six files.
    compiled_host: float = 0.77
    compiled_compute: float = 0.73
    compiled_fp8_host: float = 0.95
    # PPO on 2 H200, 7 adapters per block: training 659 ms (`qlora`) instead of 371 (all weights, `zeropp`), both bound
    # by the host (6d871a5; 0.035 in benchmarks/results/rlhf_step/h200-2-25gbit.json: 472 and 380 ms at 9e0ab3ca).
    adapter_host: float = 0.11
    # A linear layer of 8,192 tokens, the median of three shapes (benchmarks/results/fp8_linear/h200-1-local.json).
    matrix_tflops: float = 774
    fp8_tflops: float = 1350
    # `fp8-lm` 262 ms, `zeropp` 192; without updates 249 and 173 (benchmarks/results/two_nodes/h100-2-nvlink.json).
    fp8_host: float = 0.5
    # `lossless` with compiled blocks 127 ms, `zeropp` 101; not compiled and without the update 111
    # (benchmarks/results/two_nodes/h200-2-nvlink-compiled.json).
    reducer_host: float = 0.23
    # `lossless` and `fp8-lm-o2` of 3.8 B parameters on one H200, 16 to 128 x 1,024 tokens, extended to none: 117 and
    # 57 ms (benchmarks/results/fp8_lm_limits/h200-1-local-batch.json), the latter less casts of weights.
    zero3_bytes: float = 132
    # 26 ms of kernels that tokens do not change (benchmarks/results/step_profile/h200-1-1x1024-before.json).
    zeropp_bytes: float = 84
    fp8_optimizer_bytes: float = 57
    # 1.0 to 1.5, on one GPU up to 2.0, in what files were fitted to.
    fsdp_host: float = 1.0
    # 0.43 and 0.78 ms of the peers in benchmarks/plan_fit/points.py.
    tensor_host: float = 0.109
    gather_host: float = 0.198
    codec_efficiency: float = 0.8
    overlap: float = 1.0
    net_latency_us: float = 14.0
    node_latency_us: float = 3.4
    optimizer_bytes: float = 30.0

    def __post_init__(self) -> None:
        require_positive(**{name: getattr(self, name) for name in ABOVE_ZERO})
        for share in SHARES:
            if getattr(self, share) > 1:
                raise PlanError(f"{share} is a share of a rate and must not exceed 1, got {getattr(self, share)!r}")
        require_at_least_zero(**vars(self))


# 4 H200 of one host: NCCL over NVLink within a pair and the copy bandwidth were measured. host_per_block_ms and
# achieved_tflops are fitted to FSDP2 in one node, then tensor_host, gather_host and link_efficiency to
# the other peers in benchmarks/plan_fit/points.py. codec_efficiency is what benchmarks/kernels.py measured there, 0.6
# to 0.9 by kernel. link_efficiency of a network that is not this one is an assumption.
EMULATED_H200 = Hardware(intra_gbs=200, memory_gbs=4300, achieved_tflops=362, link_efficiency=0.995)
H200 = replace(EMULATED_H200, link_efficiency=0.9)
# Data sheet: memory 3,350 GB/s, of which a copy reaches as much as the H200's of 4,800; products and NVLink are the
# H200's. Kernels of a step of 8,192 tokens take 1.1 times as long (benchmarks/results/step_profile/*-4x2048.json).
H100 = replace(H200, memory_gbs=3000, achieved_tflops=330)
# Data sheet: NVLink 150 GB/s one way, memory 900 GB/s, 125 TFLOP/s; what training reaches of them is assumed.
V100 = Hardware(intra_gbs=120, memory_gbs=800, achieved_tflops=60, matrix_tflops=100, fp8_tflops=100)
PRESETS = {"h200": H200, "h100": H100, "emulated-h200": EMULATED_H200, "v100": V100}


def preset_of(gpu: str) -> str | None:
    """The name of a GPU's preset, by the GPU's name; None: there is none."""
    return next((name for name in PRESETS if name in gpu.lower()), None)
