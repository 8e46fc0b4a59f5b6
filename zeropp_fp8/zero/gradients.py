"""Reducing a bucket of gradients with qgZ inside ZeRO-3."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8.comm import ErrorFeedback, quantized_reduce_scatter
from zeropp_fp8.zero.session import Session


class GradientReducer:
    """Quantized mean of gradients over the data-parallel group, one message per bucket and hop."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.error_feedback = ErrorFeedback() if session.config.gradients.error_feedback else None

    def reduce(
        self, params: Sequence[Parameter], grads: Sequence[Tensor], names: Sequence[str], dtype: torch.dtype
    ) -> list[Tensor]:
        """For each parameter this rank's slice of the mean gradient, without padding, in `dtype`.

        Args:
            params: ZeRO-3 parameters, in the same order on every rank.
            grads: their full gradients (fp32, bf16 or fp16).
            names: stable names, the keys of error feedback.
        """
        session, topology = self.session, self.session.topology
        with session.ledger.counting("gradients"):
            session.ledger.stock_would_send(sum(p.ds_tensor.ds_numel for p in params) * topology.world_size)
            slices = quantized_reduce_scatter(
                [grad.view(param.ds_shape) for param, grad in zip(params, grads)],
                topology,
                session.intra_format,
                session.inter_format,
                ledger=session.ledger,
                generator=session.generators["gradients"],
                error_feedback=self.error_feedback,
                keys=names,
            )
        results = []
        for param, piece in zip(params, slices):
            own = min(piece.numel(), max(0, param.ds_numel - topology.rank * piece.numel()))
            results.append(piece[:own].to(dtype))
        return results
