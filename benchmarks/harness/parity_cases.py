"""The trainings of bit_parity.py: what each is, what it must be equal to, and what else must hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Size:
    """A Llama, its batches, and what ZeRO-3 may keep gathered of it (in elements)."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocab: int
    tokens: int
    bucket: int  # of gradients, and of what is fetched ahead
    max_live: int = 0
    persistence_threshold: int = 0
    lr: float = 1e-4


SIZES = {
    # The limits of two_nodes.py: some of the model stays gathered, small tensors always do.
    ("cuda", "parity"): Size(2048, 5504, 8, 16, 32000, 1024, 10**8, 2 * 10**8, 10**5),
    ("cpu", "parity"): Size(64, 152, 3, 4, 256, 64, 30_000, 60_000, 100),
    ("cuda", "features"): Size(1024, 2752, 4, 8, 4096, 512, 10**7, lr=3e-4),
    ("cpu", "features"): Size(128, 384, 2, 4, 256, 64, 100_000, lr=1e-3),
}
LORA_LR = 3e-3
CPU, PINNED = ({"device": "cpu", "pin_memory": pinned} for pinned in (False, True))
FALL_BACK = {"numerics": {"watch": "fall_back"}}
SOME_GB = 0.03 if torch.cuda.is_available() else 3e-4  # of codes: about half a model of "features"


@dataclass(frozen=True)
class Case:
    """One training run, what it must be equal to, and what else must hold."""

    name: str
    part: str
    recipe: str | None = None  # None: stock
    equal_to: str | None = None
    leaf: bool = False
    nodes: int = 2  # that the ranks are cut into
    fields: dict = field(default_factory=dict)  # of the zeropp_fp8 section
    zero: dict = field(default_factory=dict)  # of zero_optimization
    accumulation: int = 1
    lora: bool = False
    checkpointing: str | None = None  # reentrant | non-reentrant
    zero_init: bool = False
    delays: bool = False
    only_gemm_weights: bool = False  # weights that no FP8 layer multiplies are sent as they are
    falls_back: bool = False  # in the middle, to high precision
    resume: bool = False  # save in the middle, and repeat the second half from the checkpoint
    check: Callable[[dict, dict], None] | None = None  # (this case's record, records by name)


# --- the cases


def ensure(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _plain(records: dict) -> dict:
    """The record of `zeropp` with nothing added."""
    ensure("zeropp" in records, "there is no result of zeropp to compare with")
    return records["zeropp"]


def _sends_gradients(times: int) -> Callable[[dict, dict], None]:
    """Three micro-batches fetch weights between nodes once, and send so many times the gradients of one."""

    def check(record: dict, records: dict) -> None:
        wire, base = (r["wire"]["per_step"] for r in (record, _plain(records)))
        ensure(
            wire["weights_forward"]["inter"] == base["weights_forward"]["inter"],
            "three micro-batches fetched weights between nodes more than once",
        )
        sent = wire["gradients"]["inter"] / base["gradients"]["inter"]
        ensure(sent == times, f"three micro-batches sent {sent:.3f} times the gradients of one, not {times}")

    return check


def _backward_sends(inter: bool, intra: bool) -> Callable[[dict, dict], None]:
    """Whether backward's gathers send between nodes and inside them."""

    def check(record: dict, records: dict) -> None:
        sent = record["wire"]["per_step"]["weights_backward"]
        ensure((sent["inter"] > 0) == inter, f"backward sent {sent['inter']} bytes of weights between nodes")
        expected = intra and record["ranks_per_node"] > 1  # a node of one rank has nobody to send to
        ensure((sent["intra"] > 0) == expected, f"backward sent {sent['intra']} bytes of weights inside nodes")

    return check


def _sends_differences(record: dict, records: dict) -> None:
    bits = record["difference_bits"]
    ensure(bits is not None and 0 < bits < 16, f"differences of weights took {bits} bits")
    _backward_sends(inter=False, intra=True)(record, records)


def _keeps_residuals(record: dict, records: dict) -> None:
    ensure(record["residuals"] > 0, "error feedback kept no residual")
    ensure(record["losses"] != _plain(records)["losses"], "error feedback changed nothing")


def _learns_as_plain(record: dict, records: dict) -> None:
    """Gradients and states are elsewhere, by DeepSpeed, which adds up norms in another order.

    Norms then differ in the seventh digit, and INT4 makes more of it in each step: of losses that fall to a thirtieth
    the last ones are 1 to 2 % apart. So differences are taken of the loss at the beginning.
    """
    losses = torch.tensor([record["losses"], _plain(records)["losses"]])
    ensure(bool((losses[0, 0] == losses[1, 0]).all()), "the first loss is not that without offload")
    apart = ((losses[0] - losses[1]).abs().max() / losses[1, 0].min()).item()
    ensure(apart < 0.005, f"losses are up to {100 * apart:.1f} % of the first one from those without offload")
    expected, sent = (r["wire"]["per_step"]["weights_forward"]["inter"] for r in (_plain(records), record))
    ensure(sent == expected, f"forward sent {sent} bytes of weights between nodes, and {expected} without offload")


def _only_adapters_moved(record: dict, records: dict) -> None:
    moved, adapters = set(record["moved"]), {name for name in record["weights"] if "lora_" in name}
    ensure(adapters <= moved, f"did not train: {sorted(adapters - moved)[:3]}")
    ensure(moved <= adapters, f"frozen, but changed: {sorted(moved - adapters)[:3]}")


def fp8(scaling: str, weights: str, scope: str = "node") -> dict:
    """Fields of the section: FP8 linear layers, weights in some format on the wire."""
    compute = {"format": "fp8", "scaling": scaling}
    return {"compute": compute, "weights": {"format": weights}, "secondary": {"scope": scope}}


def fp8_wire(scaling: str, scope: str = "node") -> dict:
    """Of a Case: weights are sent as the codes of their GEMM."""
    return {"fields": fp8(scaling, "fp8_e4m3", scope), "only_gemm_weights": True}


BLOCK, MODULE = {"gather_granularity": "block"}, {"gather_granularity": "module"}
BLOCK_SECONDARY = {**BLOCK, "secondary": {"scope": "node"}}
BLOCK_EXACT = {**BLOCK_SECONDARY, "weights": {"difference": "exact"}}
IN_16_BITS, WHOLE = {"weights": {"format": "none"}}, {"partition": "whole_tensor"}
SOME_COPIES = {"secondary": {"scope": "rank", "memory_gb": SOME_GB}}
LORA = {"recipe": "zeropp", "lora": True, "check": _only_adapters_moved}
QLORA = {**LORA, "recipe": "qlora"}
CASES = (
    Case("stock-leaf", "parity", leaf=True),
    Case("stock-leaf, again", "parity", leaf=True, equal_to="stock-leaf"),
    Case("lossless block, 2 nodes", "parity", "lossless", "stock-leaf", fields=BLOCK),
    Case("lossless block, 1 node", "parity", "lossless", "stock-leaf", fields=BLOCK, nodes=1),
    Case("lossless block, secondary", "parity", "lossless", "stock-leaf", fields=BLOCK_SECONDARY),
    Case("lossless block, delays", "parity", "lossless", "stock-leaf", fields=BLOCK, delays=True),
    Case(
        "lossless block, exact",
        "parity",
        "lossless",
        "stock-leaf",
        fields=BLOCK_EXACT,
        check=_sends_differences,
        resume=True,
    ),
    Case("lossless block, exact, delays", "parity", "lossless", "stock-leaf", fields=BLOCK_EXACT, delays=True),
    Case("stock", "parity"),
    Case("stock, again", "parity", equal_to="stock"),
    Case("lossless module, 2 nodes", "parity", "lossless", "stock", fields=MODULE),
    Case("lossless module, 1 node", "parity", "lossless", "stock", fields=MODULE, nodes=1),
    Case("zeropp large", "parity", "zeropp"),
    Case("zeropp large, again", "parity", "zeropp", "zeropp large"),
    Case("zeropp large, delays", "parity", "zeropp", "zeropp large", delays=True),
    Case("zeropp large, accumulation", "parity", "zeropp", accumulation=3),
    Case(
        "zeropp large, accumulation, delays",
        "parity",
        "zeropp",
        "zeropp large, accumulation",
        accumulation=3,
        delays=True,
    ),
    Case("fp8-lm-o2 large", "parity", "fp8-lm-o2"),
    Case("fp8-lm-o2 large, delays", "parity", "fp8-lm-o2", "fp8-lm-o2 large", delays=True),
    Case("fp8-lm large", "parity", "fp8-lm"),
    Case("fp8-lm large, again", "parity", "fp8-lm", "fp8-lm large"),
    Case("fp8-lm large, delays", "parity", "fp8-lm", "fp8-lm large", delays=True),
    Case("fp8-lm large, accumulation", "parity", "fp8-lm", accumulation=3),
    Case(
        "fp8-lm large, accumulation, delays",
        "parity",
        "fp8-lm",
        "fp8-lm large, accumulation",
        accumulation=3,
        delays=True,
    ),
    Case("fp8-lm large, 1 node, delays", "parity", "fp8-lm", nodes=1, delays=True),
    Case("fp8-lm-zeropp large", "parity", "fp8-lm-zeropp"),
    Case("fp8-lm-zeropp large, delays", "parity", "fp8-lm-zeropp", "fp8-lm-zeropp large", delays=True),
    Case("zeropp", "features", "zeropp", check=_backward_sends(inter=False, intra=True)),
    Case(
        "secondary none",
        "features",
        "zeropp",
        "zeropp",
        fields={"secondary": {"scope": "none"}},
        check=_backward_sends(inter=True, intra=True),
    ),
    Case(
        "secondary rank",
        "features",
        "zeropp",
        "zeropp",
        fields={"secondary": {"scope": "rank"}},
        check=_backward_sends(inter=False, intra=False),
    ),
    Case(
        "some copies",
        "features",
        "zeropp",
        "zeropp",
        fields=SOME_COPIES,
        check=_backward_sends(inter=True, intra=True),
    ),
    Case("zeropp-pcie", "features", "zeropp-pcie", check=_keeps_residuals, resume=True),
    Case(
        "zeropp-pcie, some copies",
        "features",
        "zeropp-pcie",
        "zeropp-pcie",
        fields={"secondary": {"memory_gb": SOME_GB}},
        delays=True,
    ),
    Case("16-bit weights", "features", "zeropp", fields=IN_16_BITS),
    Case("zeropp-exact", "features", "zeropp-exact", "16-bit weights", check=_sends_differences, resume=True),
    Case("zeropp-exact, delays", "features", "zeropp-exact", "16-bit weights", delays=True),
    Case("16-bit weights, whole tensors", "features", "zeropp", fields={**IN_16_BITS, **WHOLE}),
    Case(
        "zeropp-exact, whole tensors",
        "features",
        "zeropp-exact",
        "16-bit weights, whole tensors",
        fields=WHOLE,
        check=_sends_differences,
        resume=True,
    ),
    Case(
        "zeropp-exact, whole tensors, delays",
        "features",
        "zeropp-exact",
        "16-bit weights, whole tensors",
        fields=WHOLE,
        delays=True,
    ),
    Case("accumulation in node", "features", "zeropp", accumulation=3, check=_sends_gradients(1)),
    Case(
        "accumulation in world",
        "features",
        "zeropp",
        accumulation=3,
        fields={"gradients": {"accumulate_in": "world"}},
        check=_sends_gradients(3),
    ),
    Case(
        "accumulation, error feedback",
        "features",
        "zeropp",
        accumulation=3,
        fields={"gradients": {"error_feedback": True}},
        check=_keeps_residuals,
    ),
    Case(
        "error feedback", "features", "zeropp", fields={"gradients": {"error_feedback": True}}, check=_keeps_residuals
    ),
    Case("compiled blocks", "features", "zeropp", fields={"compile": "blocks"}),
    Case("compiled blocks, again", "features", "zeropp", "compiled blocks", fields={"compile": "blocks"}),
    Case("compiled blocks, LoRA", "features", fields={"compile": "blocks"}, checkpointing="non-reentrant", **LORA),
    Case("zero.Init", "features", "zeropp", zero_init=True),
    *(
        Case(f"offload of {what}", "features", "zeropp", zero=zero, check=_learns_as_plain, resume=True)
        for what, zero in {
            "the optimizer": {"offload_optimizer": CPU},
            "parameters": {"offload_param": CPU},
            "both, pinned": {"offload_optimizer": PINNED, "offload_param": PINNED},
        }.items()
    ),
    Case("LoRA", "features", **LORA),
    Case("LoRA, reentrant", "features", checkpointing="reentrant", **LORA),
    Case("LoRA, non-reentrant", "features", checkpointing="non-reentrant", **LORA),
    Case("resume", "features", "zeropp", "zeropp", resume=True),
    Case(
        "resume, error feedback",
        "features",
        "zeropp",
        fields={"gradients": {"error_feedback": True}},
        resume=True,
        check=_keeps_residuals,
    ),
    Case("fp8, 16-bit wire", "features", "zeropp", fields=fp8("current", "none"), nodes=1),
    Case("fp8 wire", "features", "zeropp", "fp8, 16-bit wire", nodes=1, **fp8_wire("current")),
    Case("fp8 wire, delays", "features", "zeropp", "fp8, 16-bit wire", nodes=1, delays=True, **fp8_wire("current")),
    Case("fp8, 16-bit wire, 2 nodes", "features", "zeropp", fields=fp8("current", "none")),
    Case("fp8 wire, 2 nodes", "features", "zeropp", "fp8, 16-bit wire, 2 nodes", **fp8_wire("current")),
    Case("fp8 wire, no secondary", "features", "zeropp", "fp8, 16-bit wire, 2 nodes", **fp8_wire("current", "none")),
    Case(
        "fp8 wire, some copies",
        "features",
        "zeropp",
        "fp8, 16-bit wire, 2 nodes",
        fields={**fp8("current", "fp8_e4m3"), **SOME_COPIES},
        only_gemm_weights=True,
        delays=True,
    ),
    Case("fp8 blocks, 16-bit wire", "features", "zeropp", fields=fp8("block", "none")),
    Case("fp8 blocks, fp8 wire", "features", "zeropp", "fp8 blocks, 16-bit wire", **fp8_wire("block")),
    Case("fp8 delayed", "features", "zeropp", fields=fp8("delayed", "fp8_e4m3"), resume=True),
    Case("fp8 rows, LoRA", "features", fields=fp8("per_channel", "fp8_e4m3"), checkpointing="non-reentrant", **LORA),
    Case("mxfp8", "features", "mxfp8", resume=True),
    Case("fp8-lm-o1", "features", "fp8-lm-o1", resume=True),
    Case("fp8-lm-o2", "features", "fp8-lm-o2", resume=True),
    Case("fp8-lm-o1, accumulation", "features", "fp8-lm-o1", accumulation=3),
    Case("fp8-lm-o2, accumulation", "features", "fp8-lm-o2", accumulation=3),
    Case("fp8-lm", "features", "fp8-lm", resume=True),
    Case("fp8-lm, secondary", "features", "fp8-lm", "fp8-lm", fields={"secondary": {"scope": "node"}}),
    Case("fp8-lm, accumulation", "features", "fp8-lm", accumulation=3),
    Case("fp8-lm, delays", "features", "fp8-lm", "fp8-lm", delays=True),
    Case("fp8-lm, zero.Init", "features", "fp8-lm", zero_init=True),
    Case("fp8-lm-zeropp", "features", "fp8-lm-zeropp", resume=True),
    *(
        Case(
            f"{recipe}, differences of codes",
            "features",
            recipe,
            recipe,
            fields={"weights": {"difference": "exact"}},
            check=_sends_differences,
            delays=True,
            resume=True,
        )
        for recipe in ("zeropp", "fp8-lm-zeropp")
    ),
    *(
        Case(f"falls back, {recipe}", "features", recipe, fields=FALL_BACK, falls_back=True, resume=True, delays=True)
        for recipe in ("fp8-lm", "fp8-lm-zeropp", "zeropp-exact", "mxfp8")
    ),
    Case("fp8-lm-zeropp, accumulation", "features", "fp8-lm-zeropp", accumulation=3),
    Case("qlora", "features", resume=True, **QLORA),
    Case("qlora, delays", "features", equal_to="qlora", delays=True, **QLORA),
    Case("qlora, no secondary", "features", equal_to="qlora", fields={"secondary": {"scope": "none"}}, **QLORA),
    Case("qlora, a copy a rank", "features", equal_to="qlora", fields={"secondary": {"scope": "rank"}}, **QLORA),
    Case("qlora, some copies", "features", equal_to="qlora", fields=SOME_COPIES, delays=True, **QLORA),
    Case("qlora, zero.Init, non-reentrant", "features", zero_init=True, checkpointing="non-reentrant", **QLORA),
    Case("int4, fp8 compute", "features", fields={"frozen": {"format": "int4"}, **fp8("delayed", "none")}, **LORA),
    Case("stock-leaf, accumulation", "features", leaf=True, accumulation=3),
    Case("lossless, accumulation", "features", "lossless", "stock-leaf, accumulation", accumulation=3),
    Case("stock-leaf, zero.Init", "features", leaf=True, zero_init=True),
    Case("lossless, zero.Init", "features", "lossless", "stock-leaf, zero.Init", zero_init=True),
)
