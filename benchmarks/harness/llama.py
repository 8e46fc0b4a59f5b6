"""The Llama that the compute benchmarks train: plain torch, so that a step has no host synchronisation of its own.

transformers' Llama asks the device in every forward whether sequences are packed, which makes the host wait, and its
norms take nine passes in eager mode; both would hide what the linear layers cost.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.sizes import Size

EPSILON = 1e-5  # of the norms
ROPE_BASE = 500_000.0
INITIAL_STD = 0.02


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 and rounded once."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, EPSILON)


def rotary_tables(length: int, head_size: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) of rotary position embeddings, each [length, head_size]."""
    frequencies = ROPE_BASE ** (-torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """x [batch, heads, length, head size] turned by the angles of its positions."""
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class FeedForward(nn.Module):
    """SwiGLU, written as transformers writes it, so that what knows its modules knows this one."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.down_proj = nn.Linear(size.intermediate, size.hidden, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One transformer layer: attention, then SwiGLU, each behind a norm and added to its input."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.kv_heads = size.heads, size.kv_heads
        head_size = size.hidden // size.heads
        self.attention_norm, self.mlp_norm = RMSNorm(size.hidden), RMSNorm(size.hidden)
        self.q_proj = nn.Linear(size.hidden, size.hidden, bias=False)
        self.k_proj = nn.Linear(size.hidden, size.kv_heads * head_size, bias=False)
        self.v_proj = nn.Linear(size.hidden, size.kv_heads * head_size, bias=False)
        self.o_proj = nn.Linear(size.hidden, size.hidden, bias=False)
        self.mlp = FeedForward(size)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = x.shape
        normed = self.attention_norm(x)
        q = rotated(self.q_proj(normed).view(batch, length, self.heads, -1).transpose(1, 2), tables)
        k = rotated(self.k_proj(normed).view(batch, length, self.kv_heads, -1).transpose(1, 2), tables)
        v = self.v_proj(normed).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        grouped = self.kv_heads != self.heads
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        x = x + self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return x + self.mlp(self.mlp_norm(x))


class Stage(nn.Module):
    """Layers that follow one another, which ZeRO-3 can gather at once."""

    def __init__(self, layers: Iterable[Block]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        for layer in self.layers:
            x = layer(x, tables)
        return x


class Llama(nn.Module):
    """A causal language model; `forward` returns the mean loss of predicting every next token.

    Args:
        checkpointing: keep of every layer nothing but its input, and compute it again in backward.
        unit_layers: layers that ZeRO-3 gathers at once; above 1 they are in stages, with the same initial weights.
    """

    def __init__(self, size: Size, checkpointing: bool = False, unit_layers: int = 1) -> None:
        super().__init__()
        self.size, self.checkpointing = size, checkpointing
        self.embed = nn.Embedding(size.vocabulary, size.hidden)
        layers = [Block(size) for _ in range(size.layers)]
        if unit_layers > 1:
            layers = [Stage(layers[first : first + unit_layers]) for first in range(0, size.layers, unit_layers)]
        self._no_split_modules = [type(layers[0]).__name__]  # as transformers names what stays together
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(size.hidden)
        self.lm_head = nn.Linear(size.hidden, size.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=INITIAL_STD)
        self._tables: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """fp32 [] of int64 tokens [batch, length]."""
        x = self.embed(tokens)
        if self._tables is None or self._tables[0].shape[0] != tokens.shape[1]:
            head_size = self.size.hidden // self.size.heads
            self._tables = rotary_tables(tokens.shape[1], head_size, x.device, x.dtype)
        for layer in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, self._tables, use_reentrant=False)
            else:
                x = layer(x, self._tables)
        logits = self.lm_head(self.norm(x))
        targets = F.pad(tokens[:, 1:], (0, 1), value=-100)  # the last position of a sequence has no next token
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
