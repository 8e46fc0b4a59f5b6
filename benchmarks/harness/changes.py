"""Bits that a lossless code of 16-bit weights needs, where the weights before a step are known; and of gradients.

A weight's difference is that of two integers in the order of the numbers (`exact.in_order`): units in the last place.
Six codes, of blocks of 128 weights or less, the last three of 1024, so that a GPU finds a block's place by prefix sums:

    bitmaps   a bit for each 32 weights; where one has changed, a bit for each weight; for each change 2 bits:
              +1, -1 or an escape; for each escape 16 bits
    places    for each 128 weights a byte, the count of changes; for each a place of 7 bits, and 2 and 16 bits as above;
              all 128 as `bitmaps` has them without the first bit where that is less
    exponents what both sides know of a weight before, its exponent, says how it is sent: a table for each tensor gives
              a width in bits, beyond which it is an escape, or says that changes are seldom; those of 128 weights are
              sent as in `bitmaps` or as in `places`, which a bit says
    exact     what the package sends (formats/exact.py), with its headers
    int8      what it sends of the INT8 codes that `zeropp` makes of the weights, scales and headers included
    fp8       the same of E4M3 codes with a scale per tensor, a power of two, as FP8-LM has them

`entropy` is that of the differences, each by itself: the least that a code without memory needs. `given_exponent` is
that of a code which knows the exponent, with 16 bits more for differences beyond 127.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from zeropp_fp8.formats import exact, make_format

BLOCK, SMALL_BLOCK = 128, 32
SYMBOL, ESCAPE = 2, 16  # bits of a change, and what an escape adds
RAW = 16
CODES = ("bitmaps", "places", "exponents", "exact", "int8", "fp8")
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
INT8 = make_format("int8", block_size=256)
EXPONENT_BITS = {torch.bfloat16: 8, torch.float16: 5}
MOST = 127  # a larger difference counts as an escape where the exponent is known
KINDS = (
    ("embedding and head", ("embed", "lm_head", "output", "head.")),
    ("attention", ("q_proj", "k_proj", "v_proj", "o_proj")),
    ("MLP", ("gate_proj", "up_proj", "down_proj", "mlp.")),
)
VECTORS, REST = "vectors", "rest"


def kind_of(name: str, dims: int) -> str:
    """The kind of layer that a parameter is of."""
    if dims < 2:
        return VECTORS
    return next((kind for kind, parts in KINDS if any(part in name for part in parts)), REST)


def blocks_of(flat: Tensor, size: int) -> Tensor:
    """[blocks, size], with zeros at the end."""
    missing = -flat.numel() % size
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, size)


class Count:
    """The differences of one kind of weights, counted over tensors, on their device."""

    def __init__(self, device: torch.device) -> None:
        self.numel = 0
        self._of_difference = torch.zeros(2**17, dtype=torch.int64, device=device)  # from -2**16 on
        self._given = torch.zeros(2**8, 2 * MOST + 2, dtype=torch.int64, device=device)  # by exponent; escapes are 0
        self._bits = {code: torch.zeros((), dtype=torch.int64, device=device) for code in CODES}

    def add(self, before: Tensor, after: Tensor) -> None:
        """Count a tensor: its 16-bit numbers before and after."""
        difference = (exact.in_order(after.contiguous()) - exact.in_order(before.contiguous())).view(-1)
        self.numel += difference.numel()
        self._of_difference += torch.bincount(difference + 2**16, minlength=2**17)
        changed, escaped = difference != 0, difference.abs() > 1
        of_changes = SYMBOL * changed + ESCAPE * escaped
        small = blocks_of(changed, SMALL_BLOCK).any(1).sum()
        bitmap = blocks_of(of_changes, BLOCK).sum(1)
        self._bits["bitmaps"] += -(-difference.numel() // SMALL_BLOCK) + SMALL_BLOCK * small + of_changes.sum()
        changes = blocks_of(changed, BLOCK).sum(1)
        self._bits["places"] += (8 + torch.minimum(7 * changes + bitmap, BLOCK + bitmap).clamp(max=RAW * BLOCK)).sum()
        both = [each.view(1, -1) for each in (after, before)]
        of_int8 = [INT8.encode_rows(each).view(torch.int8) for each in both]
        scale = fp8_scale(before)
        of_fp8 = [(scale * each.float()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn) for each in both]
        for code, pair in (("exact", both), ("int8", of_int8), ("fp8", of_fp8)):
            headers = exact.make_headers(*pair)
            self._bits[code] += exact.WORD * (headers.numel() + exact.field(headers, exact.WORDS).long().sum())
        exponents = exponents_of(before).view(-1)
        beyond = difference.abs() > MOST
        place = exponents * (2 * MOST + 2) + torch.where(beyond, 0, difference + MOST + 1)
        given = torch.bincount(place, minlength=self._given.numel()).view_as(self._given)
        self._given += given
        self._bits["exponents"] += self._by_exponent(given, exponents, difference)

    @staticmethod
    def _by_exponent(given: Tensor, exponents: Tensor, difference: Tensor) -> Tensor:
        """Bits of the code `exponents` of a tensor, [], int64."""
        numels = given.sum(1)
        magnitude = torch.arange(-MOST - 1, MOST + 1, device=given.device).abs()
        magnitude[0] = 2**RAW  # escapes
        widths = torch.arange(2, 9, device=given.device)
        is_beyond = magnitude > 2 ** (widths - 1).unsqueeze(1) - 1
        beyond = is_beyond.double() @ given.double().t()  # [widths, exponents]; CUDA multiplies no integers
        in_widths = widths.unsqueeze(1) * numels + RAW * beyond.long()
        changed, escaped = numels - given[:, MOST + 1], numels - given[:, MOST : MOST + 3].sum(1)
        in_bitmap = numels + SYMBOL * changed + ESCAPE * escaped
        dense = torch.minimum(in_widths.amin(0), RAW * numels)
        is_seldom = in_bitmap <= dense
        seldom = is_seldom[exponents] & (difference != 0)
        in_small = blocks_of(seldom, SMALL_BLOCK).any(1)
        kept = blocks_of(is_seldom[exponents], SMALL_BLOCK).sum(1)  # of a small block, bits of its bitmap
        of_changes = (SYMBOL * changed + ESCAPE * escaped)[is_seldom].sum()
        in_bitmaps = blocks_of(1 + kept * in_small, BLOCK // SMALL_BLOCK).sum(1)
        in_places = 8 + 7 * blocks_of(seldom, BLOCK).sum(1)
        return (1 + torch.minimum(in_bitmaps, in_places)).sum() + of_changes + dense[~is_seldom].sum()

    def found(self) -> dict[str, float]:
        """The share that changed, the share that changed by more than 1, and bits per weight."""
        counts = self._of_difference.double().cpu()
        shares = counts[counts > 0] / self.numel
        unchanged, by_one = counts[2**16] / self.numel, counts[[2**16 - 1, 2**16 + 1]].sum() / self.numel
        return {
            "numel": self.numel,
            "changed": 1 - unchanged.item(),
            "by_more_than_one": max(0.0, (1 - unchanged - by_one).item()),
            "entropy": -(shares * shares.log2()).sum().item(),
            "given_exponent": self._entropy_given() / self.numel,
            **{code: bits.item() / self.numel for code, bits in self._bits.items()},
        }

    def _entropy_given(self) -> float:
        given = self._given.double().cpu()
        logarithms = torch.where(given > 0, (given / given.sum(1, keepdim=True)).log2(), 0.0)
        return (RAW * given[:, 0].sum() - (given * logarithms).sum()).item()


def fp8_scale(weights: Tensor) -> Tensor:
    """fp32 []: the largest power of two by which no weight leaves E4M3's range."""
    return torch.exp2(torch.floor(torch.log2(FP8_MAX / weights.float().abs().amax().clamp(min=2**-100))))


def exponents_of(weights: Tensor) -> Tensor:
    """int64: the exponents of bf16 or fp16 numbers, as they are stored."""
    bits = EXPONENT_BITS[weights.dtype]
    return (weights.contiguous().view(torch.int16).long() >> (15 - bits)) & (2**bits - 1)


def changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, dict]:
    """`Count.found` by kind of layer, and of all, of fp32 weights that are sent in 16 bits.

    Args:
        before, after: the weights by name; vectors are those of one dimension.
    """
    counts: dict[str, Count] = {}
    for name, old in before.items():
        new = after[name]
        for kind in (kind_of(name, old.dim()), "all"):
            counts.setdefault(kind, Count(old.device)).add(old.to(dtype), new.to(dtype))
    return {kind: count.found() for kind, count in counts.items()}


def bits_of_gradients(gradients: Mapping[str, Tensor]) -> dict[str, float]:
    """Bits per number of bf16 gradients, losslessly: sign and mantissa as they are, the exponent by its entropy.

    `exponent`: its entropy; `in_blocks`: that of its distance from the largest in 128, with 8 bits for the latter.
    """
    alone, in_blocks, numel = Counter(), Counter(), 0
    for gradient in gradients.values():
        bits = gradient.to(torch.bfloat16).contiguous().view(torch.int16).view(-1)
        exponents = (bits >> 7) & 0xFF
        blocks = blocks_of(exponents, BLOCK)
        distances = (blocks.amax(1, keepdim=True) - blocks).view(-1)[: exponents.numel()]
        for counter, values in ((alone, exponents), (in_blocks, distances)):
            counter.update(dict(enumerate(torch.bincount(values.long(), minlength=256).tolist())))
        numel += exponents.numel()
    exponent, distance = entropy(alone), entropy(in_blocks)
    return {"numel": numel, "exponent": 8 + exponent, "in_blocks": 8 + distance + 8 / BLOCK}


def entropy(counts: Counter) -> float:
    """Bits of a symbol that comes as often as counted."""
    total = counts.total()
    return -sum(n / total * math.log2(n / total) for n in counts.values() if n)
