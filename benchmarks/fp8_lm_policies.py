"""What pre-scaling, post-scaling and the automatic mu of FP8-LM lose of gradients, for more ranks than there are.

    python -m benchmarks.fp8_lm_policies --ranks 8,64,256 --out runs/policies.json

One GPU (or a CPU, tiny). Ranks are emulated: in each step the gradients of so many different sequences are computed one
after the other, and all policies reduce the same ones in FP8 E4M3 as the two hops of this project do: a code a number,
the codes of a node of --ranks-per-node added in fp32 and rounded to FP8 again, the nodes' sums added and stored as FP8.
The exact mean (fp32) trains the model, so all policies see one training. Scales come from the largest amax of the last
16 steps, as in zeropp_fp8/zero/reduce/gradient_scales.py, whose formulas are written out here again.

For each policy and step: signal-to-noise ratio of the reduced gradient against the exact mean (dB, over all matrices,
and of the worst matrix), the share of numbers at the largest code, and the share of numbers that became zero, of the
stage (gradients, sums of a node, results) where it is largest. FP8-LM (arXiv 2310.18313), section 2.1 and its figure.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque

import torch
from torch import Tensor

from benchmarks.harness.environment import describe
from benchmarks.harness.learning import load_data
from benchmarks.harness.llama import Llama
from benchmarks.harness.results import append_to, begin_result, end_result, read_result
from benchmarks.harness.sizes import SIZES
from examples.options import finite, new_file, several, whole
from zeropp_fp8.zero.reduce.gradient_scales import GROWTH, TOLERATED_SHARE

POLICIES = ("pre", "post", "auto")
LARGEST = 448.0  # of E4M3
HISTORY = 16  # steps
STAGES = ("gradients", "sums of nodes", "results")
SERIES = ("mu", "snr_db", "worst_snr_db", "saturated", "vanished")


class Reduction:
    """FP8 sums of the gradients of emulated ranks under one policy."""

    def __init__(self, policy: str, ranks: int, shapes: list[torch.Size], device: torch.device) -> None:
        self.policy, self.ranks = policy, ranks
        self.mu = 1.0
        self._node = [torch.zeros(shape, device=device) for shape in shapes]
        self._total = [torch.zeros(shape, device=device) for shape in shapes]
        self._device = device

    def begin(self, amax: Tensor) -> None:
        """A step, with fp32 [tensors] from earlier steps."""
        scale = LARGEST / amax
        factor = {"pre": 1 / self.ranks, "post": 1.0, "auto": self.mu}[self.policy]
        self._encode = scale * factor
        self._decode = 1 / (self._encode * self.ranks)
        self._counts = torch.zeros(len(STAGES), 2, dtype=torch.float64, device=self._device)
        self._written = [0] * len(STAGES)
        for total in self._total:
            total.zero_()

    def _rounded(self, values: Tensor, stage: int) -> Tensor:
        """fp32 numbers of the codes of fp32 values."""
        codes = values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()
        self._counts[stage, 0] += (codes.abs() == LARGEST).sum()
        self._counts[stage, 1] += ((codes == 0) & (values != 0)).sum()
        self._written[stage] += values.numel()
        return codes

    def add(self, grads: list[Tensor]) -> None:
        """The gradients of one rank."""
        for node, grad, encode in zip(self._node, grads, self._encode):
            node += self._rounded(grad * encode, 0)

    def end_node(self) -> None:
        """All ranks of a node have been added."""
        for node, total in zip(self._node, self._total):
            total += self._rounded(node, 1)
            node.zero_()

    def end(self, exact: list[Tensor]) -> dict[str, float]:
        """The step's figures against the exact means; mu moves."""
        noise, signal = [], []
        for total, decode, mean in zip(self._total, self._decode, exact):
            error = self._rounded(total, 2) * decode - mean
            noise.append(error.square().sum())
            signal.append(mean.square().sum())
        noise, signal = torch.stack(noise).double(), torch.stack(signal).double()
        written = torch.tensor(self._written, device=self._device).unsqueeze(1)
        saturated, vanished = (self._counts / written).amax(dim=0).tolist()
        figures = {
            "mu": self.mu,
            "snr_db": decibels(signal.sum() / noise.sum()),
            "worst_snr_db": decibels((signal / noise).min()),
            "saturated": saturated,
            "vanished": vanished,
        }
        if self.policy == "auto":
            self.mu *= 0.5 if saturated > TOLERATED_SHARE else GROWTH
        return figures


def decibels(ratio: Tensor) -> float:
    return 10 * torch.log10(ratio).item()


def emulate(ranks: int, args, data, device: torch.device) -> dict:
    """One training; its row of results, with a list over steps for each policy and figure."""
    torch.manual_seed(0)
    model = Llama(SIZES[args.size]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    shapes = [p.shape for p in matrices]
    reductions = [Reduction(policy, ranks, shapes, device) for policy in POLICIES]
    history: deque[Tensor] = deque(maxlen=HISTORY)
    series = {policy: {name: [] for name in SERIES} for policy in POLICIES}
    began, losses = time.perf_counter(), []

    def gradients(step: int, rank: int) -> list[Tensor]:
        tokens = data.training_batch((step * ranks + rank) * args.batch, args.batch)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens)
        found = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.detach())
        return found

    is_matrix = [p.dim() >= 2 for p in model.parameters()]
    for step in range(args.steps):
        exact = [torch.zeros_like(p) for p in model.parameters()]
        amax = torch.zeros(len(matrices), device=device)
        if not history:  # the first step takes its own amax
            for rank in range(ranks):
                grads = [g for g, many in zip(gradients(step, rank), is_matrix) if many]
                amax = torch.maximum(amax, torch.stack(torch._foreach_norm(grads, torch.inf)))
            known = amax.clone()
        else:
            known = torch.stack(list(history)).amax(dim=0)
        for reduction in reductions:
            reduction.begin(known)
        for rank in range(ranks):
            everything = gradients(step, rank)
            torch._foreach_add_(exact, everything)
            # What is reduced are bf16 gradients, as an engine has them.
            grads = [g.to(torch.bfloat16).float() for g, many in zip(everything, is_matrix) if many]
            amax = torch.maximum(amax, torch.stack(torch._foreach_norm(grads, torch.inf)))
            for reduction in reductions:
                reduction.add(grads)
                if (rank + 1) % args.ranks_per_node == 0 or rank + 1 == ranks:
                    reduction.end_node()
        torch._foreach_mul_(exact, 1 / ranks)
        history.append(amax)
        means = [mean for mean, many in zip(exact, is_matrix) if many]
        for reduction in reductions:
            for name, value in reduction.end(means).items():
                series[reduction.policy][name].append(float(f"{value:.6g}"))
        for parameter, mean in zip(model.parameters(), exact):
            parameter.grad = mean
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(
            f"{ranks} ranks, step {step + 1}: "
            + "; ".join(f"{p} {series[p]['snr_db'][-1]:.1f} dB" for p in POLICIES)
            + f", mu {series['auto']['mu'][-1]:.4g}",
            flush=True,
        )
        if time.monotonic() > args.deadline:
            break
    return {
        "ranks": ranks,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": time.perf_counter() - began,
        "losses": torch.stack(losses).view(-1, ranks).mean(dim=1).tolist()[-args.steps :],
        "policies": series,
    }


def show(rows: list[dict]) -> None:
    """Print a line for each number of ranks and policy: the last step, and the worst one."""
    print(
        f"\n{'ranks':>6} {'policy':<8}{'mu':>10}{'SNR dB':>9}{'least':>8}{'worst matrix':>14}{'saturated':>12}"
        f"{'most':>10}{'vanished':>12}{'most':>10}"
    )
    for row in rows:
        for policy, series in row["policies"].items():
            print(
                f"{row['ranks']:>6} {policy:<8}{series['mu'][-1]:>10.4g}{series['snr_db'][-1]:>9.1f}"
                f"{min(series['snr_db']):>8.1f}{series['worst_snr_db'][-1]:>14.1f}{series['saturated'][-1]:>12.1e}"
                f"{max(series['saturated']):>10.1e}{series['vanished'][-1]:>12.1e}{max(series['vanished']):>10.1e}"
            )
    sys.stdout.flush()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=several(whole(1)), default="8,64,256" if on_gpu else "4,32", help="numbers of emulated ranks"
    )
    parser.add_argument("--ranks-per-node", type=whole(1), default=8)
    parser.add_argument("--size", choices=SIZES, default="100m" if on_gpu else "tiny-bytes")
    parser.add_argument("--steps", type=whole(1), default=20 if on_gpu else 12)
    parser.add_argument("--batch", type=whole(1), default=1, help="sequences of a rank")
    parser.add_argument("--sequence", type=whole(1), default=512 if on_gpu else 64, help="tokens in a sequence")
    parser.add_argument("--lr", type=finite(above=0), default=3e-4)
    parser.add_argument("--data", nargs="+", default=["stdlib"], help="as examples/pretrain/train.py takes it")
    parser.add_argument(
        "--timeout", type=finite(above=0), default=570, help="seconds, after which no further step begins"
    )
    parser.add_argument(
        "--out",
        type=new_file,
        default="runs/fp8_lm_policies.json",
        help="JSON file, written after every number of ranks",
    )
    args = parser.parse_args(argv)
    args.ranks = [int(number) for number in args.ranks.split(",")]
    return args


def main() -> None:
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    names = ("ranks_per_node", "steps", "batch", "sequence", "lr")
    settings = {name: getattr(args, name) for name in names} | {"size": vars(SIZES[args.size])}
    begin_result(args.out, {**describe("fp8_lm_policies"), "settings": settings})
    args.deadline = time.monotonic() + args.timeout
    training, _ = load_data(args, device)
    for ranks in args.ranks:
        append_to(args.out, "rows", emulate(ranks, args, training, device))
    rows = read_result(args.out)["rows"]
    show(rows)
    if any(len(row["losses"]) < args.steps for row in rows):
        sys.exit("there was no time for all steps")
    end_result(args.out)


if __name__ == "__main__":
    main()
