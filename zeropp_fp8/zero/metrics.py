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
        self._optimizer, self._ledger = engine.optimizer, self._session.ledger
        self._shares_told = False
        self._steps = 0
        self._before: dict[tuple[str, str, str], float] = {}

    def _sums(self) -> tuple[int, dict[tuple[str, str, str], float]]:
        """(finished steps, bytes of them all by table, kind and link)."""
        report = self._ledger.report()
        steps, tables = report["steps"], ("per_step", "stock_per_step")
        rows = ((table, kind, links) for table in tables for kind, links in report[table].items())
        return steps, {(table, kind, link): n * steps for table, kind, links in rows for link, n in links.items()}

    def __call__(self) -> dict[str, float]:
        """The numbers; none where no step has been finished since."""
        done, sums = self._sums()
        steps = done - self._steps
        if not steps:
            return {}
        mean = {key: (value - self._before.get(key, 0)) / steps / MEGA for key, value in sums.items()}
        self._steps, self._before = done, sums
        found: dict[str, float] = {}
        for link, where in _WHERE.items():
            sent = {kind: value for (table, kind, on), value in mean.items() if (table, on) == ("per_step", link)}
            stock = sum(value for (table, _, on), value in mean.items() if (table, on) == ("stock_per_step", link))
            found[f"mb_{where}"] = sum(sent.values())
            found |= {f"mb_{where}/{kind}": value for kind, value in sent.items() if value}
            if stock and (link == "inter" or self._ledger.nodes == 1):
                found[f"of_stock_{where}"] = sum(sent.values()) / stock
        shares = self._session.shares
        if shares is not None and not self._shares_told:
            self._shares_told = True
            found |= {"step_share_between_nodes": shares.between, "step_share_within_nodes": shares.within}
        scales = getattr(self._optimizer, "scales", None)  # none once it has fallen back
        if scales is not None:
            found |= {f"gradient_{name}": value for name, value in scales.report().items()}
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
