"""What Python costs an iteration of TRL's DPO and GRPO, and what of it this package.

    python -m benchmarks.trl_profile --ranks 2 --out trl_profile.json

TRL's own trainers with a random Llama and a ds_config, nothing else; GRPO samples --tokens tokens for each of two
answers to a prompt in every iteration, with weights that TRL gathers for it. Of --steps iterations after --warmup the
median counts; one more is profiled (cProfile, on a GPU without autograd's own thread):

calls, ms     of all Python functions, under the profiler, which makes them about twice as slow
package       of those of zeropp_fp8, the time in the functions themselves; below, those with most
"""

from __future__ import annotations

import argparse
import cProfile
import statistics
import tempfile
import time

import torch

from benchmarks.harness import profiling
from benchmarks.harness.command import add_steps, choose_runs, command
from benchmarks.harness.hf_llama import llama_config
from benchmarks.harness.question import Question, runs_apart
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.zero3 import ds_config
from examples.options import whole

SECTIONS = {"stock": None, "lossless": {"recipe": "lossless"}, "zeropp": {"recipe": "zeropp"}}
RUNS = [f"{method}-{recipe}" for method in ("dpo", "grpo") for recipe in SECTIONS]


def measure(run: str, args, device: torch.device) -> dict:
    """The row of a run."""
    from transformers import TrainerCallback

    times, profiler = [], cProfile.Profile()

    class Watch(TrainerCallback):
        """Times of steps, and the profile of the last."""

        def on_step_begin(self, arguments, state, control, **_):
            torch.distributed.barrier()
            times.append(time.perf_counter())
            if state.global_step == args.warmup + args.steps:
                profiler.enable()

        def on_step_end(self, arguments, state, control, **_):
            profiler.disable()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[-1] = 1e3 * (time.perf_counter() - times[-1])

    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(run, args, device, folder)
        trainer.add_callback(Watch())
        trainer.train()
    row = {"run": run, "iteration_ms": statistics.median(times[args.warmup : -1])}
    return row | profiling.host_summary(profiler, args.profile, "zeropp_fp8")


def _trainer(run: str, args, device: torch.device, folder: str):
    """TRL's trainer for a run."""
    from accelerate.state import DistributedType, PartialState
    from datasets import Dataset
    from transformers import LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

    import zeropp_fp8
    from examples.rlhf.common.tokenizer import make_byte_tokenizer

    method, _, recipe = run.partition("-")
    section = SECTIONS[recipe]
    zeropp_fp8.disable() if section is None else zeropp_fp8.enable()
    if device.type == "cpu":  # Accelerate looks for an accelerator before it allows DeepSpeed
        PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_CPU)
    on_gpu = device.type == "cuda"
    asked = {
        "output_dir": folder,
        "deepspeed": ds_config(section, args.batch, small=SIZES[args.size].small, lean=False, bf16=on_gpu),
        "use_cpu": not on_gpu,
        "bf16": on_gpu,
        "max_steps": args.warmup + args.steps + 1,
        "per_device_train_batch_size": args.batch,
        "learning_rate": 1e-5,
        "max_grad_norm": 1.0,
        "report_to": [],
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "optim": "adamw_torch",
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(SIZES[args.size]))
    asked |= {"gradient_checkpointing": False}
    rows = [{"prompt": f"{n} is ", "chosen": f"{n * 3}", "rejected": f"{n * 7}"} for n in range(1, 257)]
    given = {"model": model, "processing_class": make_byte_tokenizer()}
    if method == "dpo":
        reference = LlamaForCausalLM(llama_config(SIZES[args.size]))
        return DPOTrainer(**given, ref_model=reference, args=DPOConfig(**asked), train_dataset=Dataset.from_list(rows))
    config = GRPOConfig(**asked, num_generations=2, max_completion_length=args.tokens, beta=0.0)
    data = Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
    return GRPOTrainer(**given, args=config, train_dataset=data, reward_funcs=_even_bytes)


def _even_bytes(completions: list[str], **_) -> list[float]:
    """A reward that differs between answers."""
    return [sum(byte % 2 == 0 for byte in text.encode()) / (1 + len(text)) for text in completions]


def show(result: dict) -> None:
    """Print the tables."""
    print(f"\n{'':<15}{'ms':>9}{'calls':>11}{'ms in profile':>15}{'of the package':>16}{'ms':>9}")
    for row in result["rows"]:
        print(
            f"{row['run']:<15}{row['iteration_ms']:>9.1f}{row['calls']:>11,}{row['total_ms']:>15.0f}"
            f"{row['package_calls']:>16,}{row['package_ms']:>9.1f}"
        )
    for row in result["rows"]:
        if row["functions"]:
            print(f"\n{row['run']}: functions of the package by their own time")
            profiling.show_top(row["functions"])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "trl_profile", RUNS, SIZES, "1.3b" if on_gpu else "tiny-gqa")
    parser.add_argument("--batch", type=whole(2), default=2, help="rows of a rank, even (default %(default)s)")
    parser.add_argument("--tokens", type=whole(1), default=16, help="of an answer in GRPO (default %(default)s)")
    parser.add_argument("--profile", type=whole(1), default=20, metavar="N", help="list N functions")
    add_steps(parser, steps=3, warmup=2)
    args = parser.parse_args(argv)
    args.nodes, args.gbit, args.rounds = 1, None, 1
    choose_runs(args, parser, RUNS)
    return args


QUESTION = Question(
    name="trl_profile",
    parse=parse,
    settings=("size", "ranks", "nodes", "batch", "tokens", "steps", "warmup"),
    jobs=runs_apart,
    work=measure,
    line=lambda row: f"{row['run']}: {row['iteration_ms']:.1f} ms, {row['package_calls']} calls of the package",
    compared=lambda result: {},
    show=show,
    folders=("examples", "examples/rlhf"),
)

if __name__ == "__main__":
    QUESTION.answer()
