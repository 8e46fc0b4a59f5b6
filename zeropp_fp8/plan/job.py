"""The job: a model, its batch and its GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

BYTES_16BIT = 2
GIGA = 1e9
GBIT = GIGA / 8  # bytes/s


class PlanError(ValueError):
    """A job, a machine or a measurement that cannot be. The message names the value and what it must be."""


def _require(words: str, holds: Callable[[float], bool], **values: float) -> None:
    """Raise PlanError for the first value of which it does not hold."""
    for name, value in values.items():
        if not holds(value):
            raise PlanError(f"{name} must be {words}, got {value!r}")


require_positive = partial(_require, "above 0 and finite", lambda value: 0 < value < math.inf)
require_at_least_zero = partial(_require, "0 or more and finite", lambda value: 0 <= value < math.inf)
require_whole = partial(_require, "a whole number, at least 1", lambda value: value >= 1 and not value % 1)


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer.

    Args:
        parameters: all of them, embeddings included.
        hidden, layers, vocabulary: its shape.
        tensors_per_layer: matrices of a layer (Llama: q, k, v, o, gate, up, down). Norms and biases lie below
            DeepSpeed's persistence threshold and are not gathered.
        embeddings: matrices of vocabulary x hidden: 2, or 1 where the output's is the input's.
    """

    parameters: float
    hidden: int
    layers: int
    vocabulary: int = 32000
    tensors_per_layer: int = 7
    embeddings: int = 2

    def __post_init__(self) -> None:
        require_positive(parameters=self.parameters)
        require_whole(**{name: size for name, size in vars(self).items() if name != "parameters"})
        if self.embedding_parameters >= self.parameters:
            raise PlanError(
                f"{self.embeddings} embedding(s) of {self.vocabulary} x {self.hidden} have "
                f"{self.embedding_parameters:.3g} parameters, more than the whole model of {self.parameters:.3g}; give "
                "a smaller vocabulary or hidden size"
            )

    @classmethod
    def from_parameters(
        cls, parameters: float, hidden: int | None = None, layers: int | None = None, vocabulary: int = 32000
    ) -> Model:
        """A usual shape for a size: 12 layers hidden^2 parameters in the blocks (Kaplan et al., arXiv 2001.08361,
        table 1), hidden = 128 layers where neither is given, hidden a multiple of 128.
        """
        require_positive(parameters=parameters)
        require_whole(**{name: size for name, size in (("hidden", hidden), ("layers", layers)) if size is not None})
        if hidden is None:
            rough = (parameters / (12 * layers)) ** 0.5 if layers else (parameters * 128 / 12) ** (1 / 3)
            hidden = max(128, round(rough / 128) * 128)
        blocks = parameters - 2 * vocabulary * hidden
        if layers is None:
            layers = max(1, round(blocks / (12 * hidden**2)))
        return cls(parameters, hidden, layers, vocabulary)

    @property
    def embedding_parameters(self) -> int:
        return self.embeddings * self.vocabulary * self.hidden

    @property
    def block_parameters(self) -> float:
        return (self.parameters - self.embedding_parameters) / self.layers

    @property
    def intermediate(self) -> float:
        """Width between the matrices of the feed-forward, by SwiGLU's three beside four of attention."""
        return max(self.block_parameters / self.hidden - 4 * self.hidden, 0) / 3

    @property
    def units(self) -> int:
        """The units that are gathered with block granularity: the blocks and the embeddings."""
        return self.layers + self.embeddings

    @property
    def tensors(self) -> int:
        return self.layers * self.tensors_per_layer + self.embeddings

    def matrix_flop(self, tokens: float) -> float:
        """Floating point operations of one forward pass in products with weights: 2 per parameter and token. The input
        embedding is a look-up."""
        return 2 * tokens * (self.parameters - (self.embeddings - 1) * self.vocabulary * self.hidden)

    def block_flop(self, tokens: float) -> float:
        """The share of the blocks' linear layers: without the head."""
        return 2 * tokens * (self.parameters - self.embedding_parameters)

    def forward_flop(self, tokens: float, sequence: int) -> float:
        """Floating point operations of one forward pass over `tokens` tokens.

        Beside products with weights 2 * 2 * sequence * hidden a token and layer for scores and values, halved by the
        causal mask (arXiv 2104.04473, appendix).
        """
        return self.matrix_flop(tokens) + 2 * tokens * self.layers * sequence * self.hidden


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (Hu et al., arXiv 2106.09685): beside a frozen matrix [out, in] two that are trained,
    [rank, in] and [out, rank]. Embeddings, head and norms are frozen too.

    Stock's host time for each tensor is not counted for adapters: most of their matrices lie below its persistence
    threshold of 1e5 elements.

    Args:
        rank: of the adapters.
        layers: linear layers of a block that have one; all where not given.
    """

    rank: int
    layers: int | None = None

    def __post_init__(self) -> None:
        require_whole(rank=self.rank)
        if self.layers is not None:
            require_whole(layers=self.layers)

    def in_block(self, model: Model) -> int:
        return self.layers or model.tensors_per_layer

    def sides(self, model: Model) -> tuple[float, float]:
        """The sides of a block's matrix. One of them is the hidden size, the other is the mean of the layers, so that
        adapters on all linear layers have their exact number of parameters, up to norms."""
        return model.hidden, model.block_parameters / model.tensors_per_layer / model.hidden

    def parameters(self, model: Model) -> float:
        return model.layers * self.in_block(model) * self.rank * sum(self.sides(model))


@dataclass(frozen=True)
class Cluster:
    """N nodes of L GPUs; `inter_gbit` is the rate at which one node sends to all others, in Gbit/s, one way.

    A single node has no such link; its rate is ignored.
    """

    nodes: int
    ranks_per_node: int
    inter_gbit: float = 0.0

    def __post_init__(self) -> None:
        require_whole(nodes=self.nodes, ranks_per_node=self.ranks_per_node)
        if self.nodes > 1 and not 0 < self.inter_gbit < math.inf:
            raise PlanError(
                f"{self.nodes} nodes need a link between them: inter_gbit (Gbit/s per node) must be above 0 and finite"
                f", not {self.inter_gbit!r}"
            )

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Job:
    """One training job.

    Args:
        tokens: tokens of one GPU in one micro-batch.
        sequence: tokens of one sequence; all of `tokens` where not given.
        micro_batches: gradient accumulation steps.
        kept_parameters: parameters that ZeRO-3 keeps gathered from the forward to the backward pass (the smaller of
            stage3_max_live_parameters and stage3_max_reuse_distance, which DeepSpeed sets to 1e9).
        checkpointing: activation checkpointing of every block; the backward pass then computes the forward again.
        lora: what is trained where it is not everything.
        copies: bytes that copies of codes may take on a GPU (`secondary.memory_gb`); no bound where not given.
        frozen: nothing is trained: the model only evaluates (a reference or reward model).
        learning_rate, steps: of AdamW, and how many it has taken so far (None: many); how many bits exact differences
            of weights take depends on both.

    Raises:
        PlanError: an impossible number; more adapted layers than a block has; adapters as large as what they adapt.
    """

    model: Model
    cluster: Cluster
    tokens: int
    sequence: int | None = None
    micro_batches: int = 1
    kept_parameters: float = 2e8
    checkpointing: bool = False
    lora: Lora | None = None
    copies: float | None = None
    frozen: bool = False
    learning_rate: float = 1e-5
    steps: int | None = None

    def __post_init__(self) -> None:
        require_whole(tokens=self.tokens, micro_batches=self.micro_batches)
        require_positive(learning_rate=self.learning_rate)
        if self.sequence is not None:
            require_whole(sequence=self.sequence)
            if self.tokens % self.sequence:
                raise PlanError(f"tokens ({self.tokens}) must be a multiple of sequence ({self.sequence})")
        require_at_least_zero(kept_parameters=self.kept_parameters, copies=self.copies or 0, steps=self.steps or 0)
        if self.lora is not None:
            self._check_lora(self.lora)

    def _check_lora(self, lora: Lora) -> None:
        adapted = lora.in_block(self.model)
        if adapted > self.model.tensors_per_layer:
            raise PlanError(
                f"adapters on {adapted} linear layers of a block (--lora-layers), which has "
                f"{self.model.tensors_per_layer}; give at most that many, or leave it out for all"
            )
        height, width = lora.sides(self.model)
        if lora.rank * (height + width) >= height * width:
            raise PlanError(
                f"adapters of rank {lora.rank} (--lora-rank) are as large as matrices of {height:.0f} x {width:.0f}; "
                f"give a rank below {height * width / (height + width):.0f}"
            )

    @property
    def sequence_length(self) -> int:
        return self.sequence or self.tokens

    @property
    def trained_parameters(self) -> float:
        if self.frozen:
            return 0.0
        return self.model.parameters if self.lora is None else self.lora.parameters(self.model)

    @property
    def all_parameters(self) -> float:
        return self.model.parameters + (self.trained_parameters if self.lora else 0)

    @property
    def forward_flop(self) -> float:
        """Operations of one micro-batch on one GPU; adapters take 2 per parameter and token."""
        adapters = 2 * self.tokens * self.trained_parameters if self.lora else 0
        return self.model.forward_flop(self.tokens, self.sequence_length) + adapters

    @property
    def backward_flop(self) -> float:
        """Without what checkpointing computes again: twice the forward pass, once for the gradients of inputs and once
        for those of weights, which frozen weights do not need."""
        return 2 * self.forward_flop - (self.model.matrix_flop(self.tokens) if self.lora else 0)
