"""Scales of tensors that all ranks share, so that FP8 codes can be added (FP8-LM, arXiv 2310.18313, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

OF_GRADIENTS, OF_PARTIAL_SUMS, OF_RESULTS = range(3)  # rows of `counts`


@dataclass
class SharedScales:
    """Of the tensors of one reduction, in its order; all on the tensors' device.

    Attributes:
        encode: fp32 [tensors], the same on every rank: code = FP8(gradient * encode).
        decode: fp32 [tensors]: mean gradient over ranks = sum of the ranks' codes * decode.
        amax: fp32 [tensors], becomes the larger of itself and the largest finite magnitude that this rank encodes.
        counts: int64 [3, 2], of FP8 numbers that are written: a row for those of gradients, of partial sums (between
            the hops) and of results; how many lie at the format's largest magnitude, and how many became zero though
            the number was not. Stages are kept apart because a result is written once, and its ranks' gradients W
            times: together, a per cent of cut off sums would go unnoticed among 1,000 ranks.
    """

    encode: Tensor
    decode: Tensor
    amax: Tensor
    counts: Tensor

    def of(self, members: Sequence[int], index: Tensor) -> SharedScales:
        """Those of some of the tensors, in ascending order. Neighbours share memory with the whole.

        `index`: int64, the members on the tensors' device.
        """
        start, stop = members[0], members[-1] + 1
        if stop - start == len(members):
            if len(members) == self.encode.numel():
                return self
            return SharedScales(self.encode[start:stop], self.decode[start:stop], self.amax[start:stop], self.counts)
        return SharedScales(self.encode[index], self.decode[index], self.amax[index], self.counts)
