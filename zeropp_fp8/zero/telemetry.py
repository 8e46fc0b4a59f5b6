"""The numbers of an engine by name: one snapshot, which all prints, logs and reports use.

mb_between_nodes, mb_within_nodes        megabytes (10^6) that this rank sends per step
mb_between_nodes/gradients, ...          the same by kind (comm/ledger.py), without zeros
of_stock_between_nodes                   ratio to the bytes of stock ZeRO-3; of_stock_within_nodes on one node
step_share_between_nodes, step_share_within_nodes        shares of a step's time in which these links are busy, whether
                                         or not something is computed meanwhile, once measured (bound.py)
weight_difference_bits                   that a weight's difference takes between nodes, in the last step
gradient_mu, gradient_saturated, gradient_vanished       if gradients share scales, see zeropp_fp8.wire_report
numerics/weights/lowest_snr_db, ...      from the last sample, if the section's `numerics.every` asks for samples

Bytes come from the ledger. All other numbers come from the parts of a stage (`StagePart.metrics`).
"""

from __future__ import annotations

from zeropp_fp8.comm.ledger import SENT, Meter
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage_part import StagePart

MEGA = 1e6
_WHERE = {"inter": "between_nodes", "intra": "within_nodes"}
_TOLD_ONCE = {f"step_share_{where}" for where in _WHERE.values()}
_SCALING = "gradient_"


def snapshot(session: Session, meter: Meter | None = None) -> dict[str, float]:
    """All numbers now; bytes are means over the steps of a meter (None: since the engine was made).

    No communication.
    """
    meter, found = meter or session.ledger.of_run, {}
    of_kinds = meter.report()[SENT].items()
    for link, where in _WHERE.items():
        sent, stock = meter.of_link(link)
        found[f"mb_{where}"] = sent / MEGA
        found |= {f"mb_{where}/{kind}": links[link] / MEGA for kind, links in of_kinds if links[link]}
        if stock and (link == "inter" or session.topology.nodes == 1):
            found[f"of_stock_{where}"] = sent / stock
    if session.formats.difference_bits is not None:
        found["weight_difference_bits"] = session.formats.difference_bits
    for part in session.parts:
        found |= part.metrics()
    return found


def wire_report(session: Session, total: bool = False) -> dict:
    """See zeropp_fp8.wire_report."""
    found = snapshot(session).items()
    scaling = {name.removeprefix(_SCALING): value for name, value in found if name.startswith(_SCALING)}
    return session.ledger.report(total) | ({"gradient_scaling": scaling} if scaling else {})


class StepMetrics:
    """Snapshots over time. Each covers the steps since the one before; the first covers all steps.

    A number that is measured once is in one snapshot only.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._meter = session.ledger.meter()
        self._told: set[str] = set()

    def __call__(self) -> dict[str, float]:
        """The numbers; none if no step has ended since the last call."""
        if not self._meter.steps:
            return {}
        found = snapshot(self._session, self._meter)
        self._meter.set_to_zero()
        new = {name: value for name, value in found.items() if name not in self._told}
        self._told |= _TOLD_ONCE & found.keys()
        return new


class ProgressLine(StepMetrics, StagePart):
    """Prints on rank 0, every `every` steps, the bytes per step since the last line, and FP8 gradients' scaling."""

    def __init__(self, session: Session, every: int) -> None:
        super().__init__(session)
        self._every = every

    def step_counted(self) -> None:
        step = self._session.ledger.steps
        if step % self._every or self._session.topology.rank != 0:
            return
        found = self()
        between, within = found["mb_between_nodes"], found["mb_within_nodes"]
        stock = found.get("of_stock_between_nodes")
        ratio = "one node" if stock is None else f"{stock:.3f} x stock"
        line = f"a rank sends {between:.3f} MB between nodes ({ratio}) and {within:.3f} MB within its node per step"
        if "weight_difference_bits" in found:
            line += f"; weights: {found['weight_difference_bits']:.3f} bits"
        if "gradient_mu" in found:
            saturated, vanished = (100 * found[f"{_SCALING}{name}"] for name in ("saturated", "vanished"))
            line += f"; gradients: mu {found['gradient_mu']:.3g}, {saturated:.2g} % at the largest code, "
            line += f"{vanished:.2g} % became zero"
        print(f"zeropp_fp8: step {step}: {line}", flush=True)


def formats(session: Session) -> dict[str, str]:
    """The formats in which an engine sends, computes and stores numbers; "none" is 16 or 32 bits."""
    config, states, sent = session.config, session.state_formats, session.formats
    chosen = {
        "weights": sent.weights,
        "weight_differences": session.config.weights.difference if sent.differs else None,
        "gradients_within_nodes": sent.within,
        "gradients_between_nodes": sent.between,
        "compute": config.compute.format,
        "optimizer": states and f"{states.master}, {states.exp_avg}, {states.exp_avg_sq}",
        "frozen": config.frozen.format,
    }
    return {"recipe": str(config.recipe).lower()} | {what: str(name or "none") for what, name in chosen.items()}
