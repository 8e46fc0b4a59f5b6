"""Step time, loss and bytes of ZeRO-3 configurations on two emulated nodes.

    python benchmarks/two_nodes.py --gbit 25 --runs stock,zeropp,zeropp-4bit --dtypes bf16,fp16 --out results.json

Runs as root. On GPUs 4 ranks as 2 nodes x 2 over NCCL, else 4 gloo ranks on the CPU with a small model. All runs of a
call use the same model, data and seed, one after the other in the same processes; `tx_bytes` is read from the
interface of node 0 around the timed steps and stands beside the ledger's count.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the package, where it is not installed

from emulated_nodes import launch, sent_bytes, two_nodes

RUNS = ("stock", "stock-leaf", "lossless", "zeropp", "zeropp-4bit")
MODELS = {
    # hidden, intermediate, layers, heads, vocabulary: 1.33B parameters as in the published ZeRO++ sizes
    "1.3b": (2048, 5504, 24, 16, 32000),
    "tiny": (128, 344, 4, 4, 512),
}


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", type=float, default=25.0, help="rate between the nodes in Gbit/s; 0: not shaped")
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--dtypes", default="bf16")
    parser.add_argument("--model", default="1.3b", choices=MODELS)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per rank and step")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--collectives", action="store_true", help="also check the collectives against float64")
    parser.add_argument("--timeout", type=float, default=550)
    parser.add_argument("--out", default="two_nodes.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def ds_config(run: str, dtype: str) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": int(1e8),
            "stage3_prefetch_bucket_size": int(1e8),
            "stage3_max_live_parameters": int(2e8),
            "stage3_max_reuse_distance": int(2e8),
        },
        dtype: {"enabled": True} if dtype == "bf16" else {"enabled": True, "initial_scale_power": 12},
    }
    if not run.startswith("stock"):
        config["zeropp_fp8"] = {"recipe": run, "report": {"every": 0}}
    return config


def build_model(name: str, device):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers, heads, vocab = MODELS[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocab,
        use_cache=False,
    )
    with device:
        return LlamaForCausalLM(config)


def check_collectives(device) -> list[dict]:
    """The mean gradient and the gathered weights against float64, for every dtype."""
    import torch
    import torch.distributed as dist

    from zeropp_fp8.comm import make_topology, quantized_all_gather, quantized_reduce_scatter
    from zeropp_fp8.formats import make_format

    topology = make_topology(ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    rows = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        generator = torch.Generator(device=device).manual_seed(dist.get_rank())
        for std in (1.0, 1e-2, 1e-4):
            grad = torch.randn(1000, 1037, generator=generator, device=device).mul_(std).to(dtype)
            everyone = [torch.empty_like(grad) for _ in range(topology.world_size)]
            dist.all_gather(everyone, grad)
            exact = torch.stack([g.double() for g in everyone]).mean(0).view(-1)
            for name, intra, inter in (("int8/int8", "int8", "int8"), ("int8/int4-hadamard", "int8", "int4")):
                mine = quantized_reduce_scatter(
                    [grad], topology, make_format(intra), make_format(inter, hadamard=inter == "int4")
                )[0]
                full = quantized_all_gather(mine, make_format("none", dtype=torch.float32), topology)
                full = full[: exact.numel()].double()
                cosine = torch.nn.functional.cosine_similarity(full, exact, dim=0).item()
                rows.append(
                    {
                        "dtype": str(dtype).removeprefix("torch."),
                        "std": std,
                        "formats": name,
                        "cosine": cosine,
                        "norm_ratio": (full.norm() / exact.norm()).item(),
                    }
                )
    return rows


def measure(run: str, dtype: str, args, device) -> dict:
    """Train for warm-up and timed steps; one row of results."""
    import deepspeed
    import torch

    import zeropp_fp8

    zeropp_fp8.disable() if run.startswith("stock") else zeropp_fp8.enable()
    on_gpu = device.type == "cuda"
    if on_gpu:
        # DeepSpeed's engines leave about 5 GiB behind after destroy(); a run's peak is counted from what it found.
        torch.cuda.synchronize()
        found = torch.cuda.memory_allocated()
    model = build_model(args.model, device)
    if run == "stock-leaf":
        deepspeed.utils.set_z3_leaf_modules(model, ["LlamaDecoderLayer"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config(run, dtype))[0]
    del model, optimizer
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    vocab = MODELS[args.model][-1]
    generator = torch.Generator().manual_seed(7 + torch.distributed.get_rank())
    losses, times = [], []
    for step in range(args.warmup + args.steps):
        tokens = torch.randint(0, vocab, (1, args.tokens), generator=generator).to(device)
        if step == args.warmup:
            torch.distributed.barrier()
            before, ledger_before = sent_bytes(), _ledger_inter(engine)
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    torch.distributed.barrier()
    sent = sent_bytes() - before
    row = {
        "run": run,
        "dtype": dtype,
        "step_ms": 1e3 * statistics.median(times[args.warmup :]),
        "losses": losses,
        "tx_bytes_per_node_step": sent / args.steps,
        "peak_gib": (torch.cuda.max_memory_allocated() - found) / 2**30 if on_gpu else None,
    }
    if not run.startswith("stock"):
        row["wire"] = zeropp_fp8.wire_report(engine, total=True)
        row["ledger_inter_bytes_per_node_step"] = (_ledger_inter(engine) - ledger_before) / args.steps
    engine.destroy()
    del engine
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return row


def _ledger_inter(engine) -> float:
    """Bytes that one node has sent to the other in finished steps, by the ledger; 0 without the plugin."""
    import zeropp_fp8

    if engine.optimizer.__class__.__name__ != "ZeroppStage3":
        return 0.0
    report = zeropp_fp8.wire_report(engine, total=True)
    return sum(kind["inter"] for kind in report["per_step"].values()) * report["steps"] / 2


def worker(args) -> None:
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        os.environ["DS_ACCELERATOR"] = "cpu"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(os.environ["STORE_FILE"], world),
        rank=rank,
        world_size=world,
        device_id=device if on_gpu else None,
    )
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", auto_mpi_discovery=False)
    result = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/two_nodes.py " + " ".join(a for a in sys.argv[1:] if a != "--worker"),
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "gbit": args.gbit,
        "model": args.model,
        "tokens": args.tokens,
        "rows": [],
    }
    if args.collectives:
        result["collectives"] = check_collectives(device)
    for dtype in args.dtypes.split(","):
        for run in args.runs.split(","):
            result["rows"].append(measure(run, dtype, args, device))
            if rank == 0:
                Path(args.out).write_text(json.dumps(result, indent=1))
                print(line(result["rows"][-1], result["rows"][0]), flush=True)
    dist.destroy_process_group()


def line(row: dict, first: dict) -> str:
    ledger = row.get("ledger_inter_bytes_per_node_step")
    return (
        f"{row['run']:<12}{row['dtype']:<6}{row['step_ms']:>9.1f} ms  {first['step_ms'] / row['step_ms']:>5.2f} x first"
        f"   tx {row['tx_bytes_per_node_step'] / 1e6:>9.2f} MB  ledger {ledger / 1e6 if ledger else 0:>9.2f} MB"
        f"   loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}"
        + (f"   peak {row['peak_gib']:.2f} GiB" if row["peak_gib"] else "")
    )


def main() -> None:
    args = parse()
    if args.worker:
        worker(args)
        return
    with two_nodes(args.gbit or None), tempfile.TemporaryDirectory() as folder:
        launch(__file__, [*sys.argv[1:], "--worker"], 4, Path(folder, "store"), args.timeout)
    result = json.loads(Path(args.out).read_text())
    for row in result.get("collectives", []):
        print(
            f"{row['dtype']:<9} std {row['std']:<7} {row['formats']:<20} "
            f"cosine {row['cosine']:.6f} norm {row['norm_ratio']:.5f}"
        )
    print("\n".join(line(row, result["rows"][0]) for row in result["rows"]))


if __name__ == "__main__":
    main()
