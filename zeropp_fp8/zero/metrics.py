"""What a rank sends a step, and what became of FP8 gradients, as numbers with names, for who draws them over time.

mb_between_nodes, mb_within_nodes        megabytes (10^6) that this rank sends a step
mb_between_nodes/gradients, ...          the same by kind (comm/ledger.py), without what is zero
of_stock_between_nodes                   times what stock ZeRO-3 would send there; of_stock_within_nodes on one node
step_share_between_nodes, step_share_within_nodes        shares of a step's time in which these links are busy, whether
                                         or not something is computed meanwhile; once, when they are measured (bound.py)
gradient_mu, gradient_saturated, gradient_vanished       where gradients share scales, see zeropp_fp8.wire_report
numerics/weights/lowest_snr_db, ...      of the last sample, where the section's `numerics.every` asks for samples
"""

from __future__ import annotations

from zeropp_fp8.zero.report import MEGA
from zeropp_fp8.zero.session import Session

_WHERE = {"inter": "between_nodes", "intra": "within_nodes"}


class StepMetrics:
    """Of an engine of the plugin, each time over the steps since the last time. No communication.

    The first time they are those since the engine was made.
    """

    def __init__(self, engine) -> None:
        self._session = engine.zeropp_fp8_session
        self._meter = self._session.ledger.meter()
        self._shares_told = False

    def __call__(self) -> dict[str, float]:
        """The numbers; none where no step has been finished since."""
        if not self._meter.steps:
            return {}
        found: dict[str, float] = {}
        for link, where in _WHERE.items():
            sent, stock = self._meter.of_link(link)
            found[f"mb_{where}"] = sent / MEGA
            of_kinds = self._meter.report()["per_step"].items()
            found |= {f"mb_{where}/{kind}": links[link] / MEGA for kind, links in of_kinds if links[link]}
            if stock and (link == "inter" or self._session.topology.nodes == 1):
                found[f"of_stock_{where}"] = sent / stock
        self._meter.set_to_zero()
        shares = self._session.shares
        if shares is not None and not self._shares_told:
            self._shares_told = True
            found |= {"step_share_between_nodes": shares.between, "step_share_within_nodes": shares.within}
        for part in self._session.parts:
            found |= {f"gradient_{name}": value for name, value in part.report().items()}
        return found | self._session.numerics


def formats(session: Session) -> dict[str, str]:
    """What an engine sends, computes and keeps numbers in; "none" is 16 or 32 bits."""
    config, states = session.config, session.state_formats
    chosen = {
        "weights": session.weight_format,
        "weight_differences": session.difference_format,
        "gradients_within_nodes": session.intra_format,
        "gradients_between_nodes": session.inter_format,
        "compute": config.compute.format,
        "optimizer": states and f"{states.master}, {states.exp_avg}, {states.exp_avg_sq}",
        "frozen": config.frozen.format,
    }
    return {"recipe": str(config.recipe).lower()} | {what: str(name or "none") for what, name in chosen.items()}
