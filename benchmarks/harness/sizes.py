"""Sizes of the models that benchmarks train, each in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Sizes of a Llama. `kv_heads` below `heads`: grouped-query attention."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def small(self) -> bool:
        """Whether all its tensors are below ZeRO-3's usual limits, so that they would stay gathered."""
        return self.hidden < 1024

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of a layer."""
        attention = 2 * self.hidden * self.hidden * (1 + self.kv_heads / self.heads)
        return round(attention) + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """Of the whole model, whose input and output embeddings are two."""
        norms = (2 * self.layers + 1) * self.hidden
        return self.layers * self.layer_matrices + 2 * self.hidden * self.vocabulary + norms


SIZES = {
    "8b": Size(hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocabulary=128256),  # Llama 3
    "7b": Size(hidden=4096, intermediate=11008, layers=32, heads=32, kv_heads=32, vocabulary=32000),  # Llama
    "4b": Size(hidden=3072, intermediate=8192, layers=32, heads=24, kv_heads=24, vocabulary=32000),
    "2b": Size(hidden=2560, intermediate=6912, layers=24, heads=20, kv_heads=20, vocabulary=32000),
    "1.3b": Size(hidden=2048, intermediate=5504, layers=24, heads=16, kv_heads=16, vocabulary=32000),  # of ZeRO++
    "1b": Size(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, vocabulary=128256),  # Llama 3.2
    "8b-stack": Size(hidden=4096, intermediate=14336, layers=8, heads=32, kv_heads=8, vocabulary=32000),  # fits a GPU
    "7b-stack": Size(hidden=4096, intermediate=11008, layers=8, heads=32, kv_heads=32, vocabulary=32000),
    "100m": Size(hidden=768, intermediate=2048, layers=12, heads=12, kv_heads=12, vocabulary=256),  # of bytes
    "25m": Size(hidden=512, intermediate=1408, layers=8, heads=8, kv_heads=8, vocabulary=256),
    "small": Size(hidden=256, intermediate=688, layers=6, heads=4, kv_heads=4, vocabulary=2048),  # outweighs latency
    "tiny": Size(hidden=128, intermediate=352, layers=4, heads=4, kv_heads=4, vocabulary=512),
    "tiny-gqa": Size(hidden=256, intermediate=768, layers=3, heads=4, kv_heads=2, vocabulary=512),
    "tiny-bytes": Size(hidden=128, intermediate=256, layers=2, heads=2, kv_heads=2, vocabulary=256),
}


@dataclass(frozen=True)
class MixtureSize(Size):
    """Sizes of a Qwen3-MoE. `intermediate` is that of an expert, of which a token takes `chosen`."""

    head_dim: int
    experts: int
    chosen: int

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of a layer, of all experts."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + self.experts * (3 * self.hidden * self.intermediate + self.hidden)

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return super().parameters + 2 * self.layers * self.head_dim


_A3B = {"hidden": 2048, "intermediate": 768, "heads": 32, "kv_heads": 4, "head_dim": 128, "experts": 128, "chosen": 8}
MIXTURES = {
    "30b-a3b": MixtureSize(layers=48, vocabulary=151936, **_A3B),  # Qwen3-30B-A3B
    "4b-moe": MixtureSize(layers=6, vocabulary=32000, **_A3B),  # the same, cut
    "2b-moe": MixtureSize(
        hidden=1024,
        intermediate=768,
        layers=15,
        heads=16,
        kv_heads=4,
        vocabulary=32000,
        head_dim=64,
        experts=64,
        chosen=8,
    ),  # its largest parameter has 0.2 GB in bf16, a fourth of Qwen3-30B-A3B's
    "255m-a85m": MixtureSize(
        hidden=768,
        intermediate=1024,
        layers=12,
        heads=12,
        kv_heads=12,
        vocabulary=256,
        head_dim=64,
        experts=8,
        chosen=2,
    ),  # of bytes; a token uses as many parameters as in "100m"
    "small-moe": MixtureSize(
        hidden=512, intermediate=128, layers=4, heads=8, kv_heads=2, vocabulary=2048, head_dim=64, experts=128, chosen=8
    ),  # as many experts, for CPUs
    "tiny-moe": MixtureSize(
        hidden=128, intermediate=64, layers=2, heads=4, kv_heads=2, vocabulary=512, head_dim=32, experts=8, chosen=2
    ),
}
EVERY_SIZE = SIZES | MIXTURES
PEAK_FLOPS = 989e12  # of an H200 (and H100) in dense bf16; the same for all runs, so that FP8 may exceed its half


def flops_per_token(size: Size, length: int) -> float:
    """Of a training step, without what checkpointing computes twice.

    6 for every weight that is multiplied (all but the embedding and the norms), and for attention half of
    12 * layers * hidden * length, because a position sees only those before it.
    """
    weights = size.layers * size.layer_matrices + size.hidden * size.vocabulary
    return 6 * weights + 6 * size.layers * size.hidden * length
