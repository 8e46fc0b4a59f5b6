"""Whether `lossless` is stock ZeRO-3 bit for bit under deterministic algorithms, and whether every feature trains.

    torchrun --nproc_per_node 4 --max-restarts 3 -m benchmarks.bit_parity --out bit_parity.json
    torchrun --nproc_per_node 4 -m benchmarks.bit_parity --device cpu --out bit_parity.json

On GPUs over NCCL, on CPUs over gloo with a small model; an even number of ranks, one host. With more ranks than GPUs,
ranks share them, and NCCL takes each rank for a host of its own (2 ranks on one H200: 2 ms a collective): what streams
and kernels do in nodes of several ranks, without as many GPUs. Every case builds an engine, trains it with
`torch.use_deterministic_algorithms(True)`, eager attention and the seeds and data of all other cases, and destroys it.

    parity      fresh batches; losses and gradient norms of all steps and ranks and a hash of all weights (16-bit shards
                and fp32 master shards of all ranks) must be those of another case, bit for bit: stock against itself,
                `lossless` against stock (with decoder layers as z3 leaf modules for blocks), `zeropp` against itself.
                "delays" lets every rank stop for random times inside every layer, forward and backward, and on a GPU
                before every collective, on its stream: a stream that fails to wait for another one then reads what is
                not there yet, or not any more.
    features    one batch over and over, on a smaller model: losses must be finite, end lower than they began and never
                rise above that; where equality is promised (resuming, scopes of the secondary shard, exact differences,
                `lossless`), it is tested as above. An FP8 weight that is sent as its GEMM's codes must give what a cast
                of the gathered 16-bit weight gives.

A case that raises on every rank is FAILED and the others go on. A rank that raises alone, or a case that takes longer
than --case-timeout, ends the processes; with --max-restarts, torchrun starts them again and the next case follows.
The exit status is 1 unless every case is well.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import io
import json
import logging
import math
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

from benchmarks.harness.environment import describe, forget_memory
from benchmarks.harness.parity_cases import CASES, LORA_LR, SIZES, Case, Size, ensure
from benchmarks.harness.results import write_result
from examples.options import finite, new_file, whole

CONTROL_TIMEOUT = 60  # seconds in which all ranks must end a case once one has
GROUP_TIMEOUT = 120


# --- one case, on every rank


def ds_config(case: Case, size: Size, world: int) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": size.bucket,
            "stage3_prefetch_bucket_size": size.bucket,
            "stage3_max_live_parameters": size.max_live,
            "stage3_max_reuse_distance": size.max_live,
            "stage3_param_persistence_threshold": size.persistence_threshold,
            **case.zero,
        },
    }
    if case.recipe is not None:
        config["zeropp_fp8"] = {
            "recipe": case.recipe,
            "topology": {"ranks_per_node": world // case.nodes},
            "report": {"every": 0, "diagnose": False},
            **case.fields,
        }
    return config


def build_model(case: Case, size: Size, config: dict, device, seed: int):
    """A random Llama with what the case adds to it."""
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    llama = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        vocab_size=size.vocab,
        use_cache=False,
        attn_implementation="eager",
    )
    with deepspeed.zero.Init(config_dict_or_path=config) if case.zero_init else device:
        model = LlamaForCausalLM(llama)
    if case.zero_init:
        ensure(all(hasattr(p, "ds_tensor") for p in model.parameters()), "zero.Init did not partition the model")
    if case.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed + 1)
        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    if case.checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": case.checkpointing == "reentrant"})
        model.enable_input_require_grads()
    if case.leaf:
        deepspeed.utils.set_z3_leaf_modules(model, ["LlamaDecoderLayer"])
    if case.delays:
        add_delays(model, device)
    return model


def add_delays(model, device) -> None:
    """Stop inside every decoder layer, forward and backward, for times that differ by rank and call."""
    import torch

    draw = random.Random(torch.distributed.get_rank())

    def pause(*_) -> None:
        if device.type == "cuda":
            torch.cuda._sleep(draw.randrange(2_000_000))  # clock cycles of the current stream: up to about 1 ms
        else:
            time.sleep(draw.random() * 2e-3)

    def after_forward(module, inputs, output) -> None:
        pause()
        if output.requires_grad:
            output.register_hook(pause)

    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_hook(after_forward)


@contextlib.contextmanager
def slow_links(on_gpu: bool):
    """While it lasts every collective of the plugin begins later on its stream, by up to 3 ms: what is read when it is
    over is read long after the host has gone on, and nothing on the stream of computing may have overwritten it."""
    import torch

    from zeropp_fp8.comm import issue

    if not on_gpu:
        yield
        return
    stock, draw = issue.timed, random.Random(torch.distributed.get_rank())

    def later(*arguments):
        torch.cuda._sleep(draw.randrange(6_000_000))
        return stock(*arguments)

    issue.timed = later
    try:
        yield
    finally:
        issue.timed = stock


class Run:
    """An engine for a case, and its steps. Close it whatever happens."""

    def __init__(self, case: Case, args, device, seed: int = 0) -> None:
        import deepspeed
        import torch
        import torch.distributed as dist

        import zeropp_fp8

        zeropp_fp8.disable() if case.recipe is None else zeropp_fp8.enable()
        self.case, self.device, self.engine = case, device, None
        self.size = SIZES[device.type, case.part]
        config = ds_config(case, self.size, dist.get_world_size())
        model = build_model(case, self.size, config, device, seed)
        trained = [p for p in model.parameters() if p.requires_grad]
        lr = LORA_LR if case.lora else self.size.lr
        optimizer = torch.optim.AdamW(trained, lr=lr, fused=device.type == "cuda")
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        if case.only_gemm_weights:
            from zeropp_fp8.formats import UnquantizedFormat

            gatherer = self.engine.optimizer.gatherer
            ensure(len(gatherer.route.gemm_weights) > 0, "no weight is sent as the codes of its GEMM")
            route = gatherer.route
            of_session = route.format_of
            route.format_of = lambda p: of_session(p) if p in route.gemm_weights else UnquantizedFormat(p.dtype)
            for unit in gatherer.units:
                unit.layout = None  # made already where memory for copies is bounded

    def _tokens(self, step: int, micro: int):
        """[1, tokens] int64; the same in every case, different ones on every rank, and in every step of `parity`."""
        import torch

        place = (step if self.case.part == "parity" else 0) * 100 + micro
        generator = torch.Generator().manual_seed(place * 1000 + torch.distributed.get_rank())
        return torch.randint(0, self.size.vocab, (1, self.size.tokens), generator=generator).to(self.device)

    def train(self, steps: range) -> tuple[list[float], list[float]]:
        """(mean losses of the micro-batches, gradient norms) of these steps; read only at the end.

        Reading a loss earlier would make the host wait, and with it hide a stream that does not.
        """
        losses, norms = [], []
        with slow_links(self.case.delays and self.device.type == "cuda"):
            for step in steps:
                parts = []
                for micro in range(self.case.accumulation):
                    tokens = self._tokens(step, micro)
                    loss = self.engine(input_ids=tokens, labels=tokens).loss
                    self.engine.backward(loss)
                    self.engine.step()
                    parts.append(loss.detach().double())
                losses.append(sum(parts) / len(parts))
                norms.append(self.engine.get_global_grad_norm())
        return [float(loss) for loss in losses], [float(norm) for norm in norms]

    def hashes(self) -> dict[str, str]:
        """By parameter: a hash of this rank's slice, in 16 bits and (where it trains) of the fp32 master weight."""
        import torch
        import torch.distributed as dist
        from deepspeed.utils import safe_get_local_fp32_param

        found = {}
        for name, param in self.engine.module.named_parameters():
            size = param.ds_tensor.ds_numel
            own = min(size, max(0, param.ds_numel - dist.get_rank() * size))  # without padding
            session = getattr(self.engine, "zeropp_fp8_session", None)
            if session is not None:
                own = session.own_numel(param)
            digest = hashlib.sha256()
            for shard in (param.ds_tensor, safe_get_local_fp32_param(param) if param.requires_grad else None):
                if shard is not None:
                    digest.update(shard.detach().flatten()[:own].contiguous().cpu().view(torch.uint8).numpy())
            found[name] = digest.hexdigest()
        return found

    def observations(self) -> dict:
        """Return what the checks look at, of an engine with the plugin."""
        import zeropp_fp8

        if self.case.recipe is None:
            return {}
        feedback, session = self.engine.optimizer.reducer.error_feedback, self.engine.zeropp_fp8_session
        return {
            "wire": zeropp_fp8.wire_report(self.engine),
            "residuals": 0 if feedback is None else len(feedback),
            "difference_bits": session.formats.difference_bits,
            "ranks_per_node": session.topology.ranks_per_node,
        }

    def close(self) -> None:
        import zeropp_fp8

        if self.engine is not None:
            self.engine.destroy()
        self.engine = None
        zeropp_fp8.disable()


@contextlib.contextmanager
def running(*arguments, **options):
    """A Run that is closed at the end."""
    run = Run(*arguments, **options)
    try:
        yield run
    finally:
        run.close()


def run_case(case: Case, args, device, folder: str) -> dict:
    """Train; returns this rank's losses, norms, hashes and observations."""
    half = args.steps // 2
    with running(case, args, device) as run:
        start = run.hashes() if case.lora else None
        losses, norms = run.train(range(half))
        if case.falls_back:
            from zeropp_fp8.zero.fall_back import fall_back

            fall_back(run.engine.optimizer)
        if case.resume:
            run.engine.save_checkpoint(folder, tag="half")
        more = run.train(range(half, args.steps))
        losses, norms, weights = losses + more[0], norms + more[1], run.hashes()
        record = {"losses": losses, "norms": norms, "weights": weights, **run.observations()}
        if case.lora:
            record["moved"] = [name for name, digest in weights.items() if digest != start[name]]
    if case.resume:
        forget_case(device)
        with running(case, args, device, seed=5) as run:  # of other weights than those to come
            run.engine.load_checkpoint(folder, tag="half")
            more = run.train(range(half, args.steps))
            record["resumed"] = {
                "losses": losses[:half] + more[0],
                "norms": norms[:half] + more[1],
                "weights": run.hashes(),
            }
    return record


def forget_case(device) -> int:
    """Free what can be freed, also after a case that failed; returns the bytes still allocated."""
    from deepspeed.runtime.zero import parameter_offload

    parameter_offload.FWD_MODULE_STACK.clear()
    return forget_memory(device)


# --- judging


def joined(records: list[dict]) -> dict:
    """Records of all ranks as one: losses and norms [step][rank], a tensor's hashes one after the other."""
    whole = dict(records[0])
    for key in ("losses", "norms"):
        whole[key] = [list(step) for step in zip(*(record[key] for record in records))]
    whole["weights"] = {name: "".join(r["weights"][name] for r in records) for name in records[0]["weights"]}
    if "moved" in whole:
        whole["moved"] = sorted({name for record in records for name in record["moved"]})
    if "resumed" in whole:
        whole["resumed"] = joined([record["resumed"] for record in records])
    return whole


def differences(record: dict, reference: dict) -> str:
    """Where two records differ, in words; empty when they are equal bit for bit."""
    found = []
    for key in ("losses", "norms"):
        mine, other = record[key], reference[key]
        first = next((step for step, (a, b) in enumerate(zip(mine, other)) if a != b), None)
        if len(mine) != len(other):
            found.append(f"{len(mine)} {key} against {len(other)}")
        elif first is not None:
            found.append(f"{key} from step {first + 1} on")
    mine, other = record["weights"], reference["weights"]
    if mine.keys() != other.keys():
        found.append("other tensors")
    else:
        names = [name for name in mine if mine[name] != other[name]]
        if names:
            found.append(f"{len(names)} of {len(mine)} tensors, {names[0]} first")
    return "; ".join(found)


def means(record: dict) -> list[float]:
    """The loss of each step, mean over ranks."""
    return [sum(step) / len(step) for step in record["losses"]]


def judge(case: Case, record: dict, records: dict) -> str:
    """Return what to say of a case that ran.

    Raises:
        AssertionError: it is not well.
    """
    losses = means(record)
    ensure(all(map(math.isfinite, losses)), f"a loss is not finite: {losses}")
    if case.part == "features":
        ensure(losses[-1] < losses[0] == max(losses), "the loss did not go down, or rose above the first")
    if case.check is not None:
        case.check(record, records)
    said = []
    if "resumed" in record:
        found = differences(record["resumed"], record)
        ensure(not found, f"resumed training differs from uninterrupted training: {found}")
        said.append("resumed equal")
    if case.equal_to is not None:
        ensure(case.equal_to in records, f"there is no result of {case.equal_to} to compare with")
        found = differences(record, records[case.equal_to])
        ensure(not found, f"differs from {case.equal_to}: {found}")
        said.append(f"equal to {case.equal_to}")
    return ", ".join(said) or "trained"


# --- all cases, on every rank


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--steps", type=whole(1), default=12, help="optimizer steps of every case")
    parser.add_argument("--parts", default="parity,features")
    parser.add_argument("--cases", help="only those whose name holds one of these words, separated by semicolons")
    parser.add_argument(
        "--fill-uninitialized",
        action="store_true",
        help="let torch fill new memory with NaN, which finds what reads it before it is written",
    )
    parser.add_argument("--case-timeout", type=finite(above=0), default=GROUP_TIMEOUT, help="seconds for one case")
    parser.add_argument("--out", type=new_file, default="runs/bit_parity.json")
    args = parser.parse_args(argv)
    if "WORLD_SIZE" not in os.environ or int(os.environ["WORLD_SIZE"]) % 2:
        parser.error("start it with torchrun on an even number of ranks: torchrun --nproc_per_node 4 ...")
    return args


def chosen_cases(args) -> list[Case]:
    """The cases asked for, and those that they are compared with."""
    words = args.cases.split(";") if args.cases else [""]
    names = set()
    for case in CASES:
        if case.part in args.parts.split(",") and any(word in case.name for word in words):
            names |= {case.name, case.equal_to, "zeropp" if case.check else None}
    return [case for case in CASES if case.name in names]


def join(args):
    """Make this rank ready; returns its device and a group of gloo for what the ranks tell each other."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic with it; read when CUDA starts
    # All ranks are on this host. NVLink multicast is off as in emulated_nodes.py.
    for name, value in {
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }.items():
        os.environ.setdefault(name, value)
    import torch
    import torch._dynamo  # torch 2.13: zero.Init breaks its import, so it must come first
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)
    on_gpu = args.device == "cuda" or (args.device is None and torch.cuda.is_available())
    os.environ["DS_ACCELERATOR"] = "cuda" if on_gpu else "cpu"
    gpus = torch.cuda.device_count() if on_gpu else 0
    if on_gpu and gpus < int(os.environ["LOCAL_WORLD_SIZE"]):  # of one host NCCL wants a GPU for each rank
        os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"
    if on_gpu:  # DeepSpeed takes the device from there
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % gpus)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = args.fill_uninitialized
    backend = "nccl" if on_gpu else "gloo"
    timeout = timedelta(seconds=GROUP_TIMEOUT)
    # torchrun keeps its store when it starts the ranks again: they must not read addresses of the ranks before.
    store, rank, world = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"start{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=CONTROL_TIMEOUT))

    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # 30 s of gcc on a CPU, for nothing used here
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
    return device, control


def gathered(mine, control) -> list:
    """`mine` of all ranks."""
    import torch.distributed as dist

    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine, group=control)
    return gathered


def earlier(args) -> dict | None:
    """Return what was found before torchrun started the ranks again; None at the first start."""
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) and Path(args.out).exists()
    return json.loads(Path(args.out).read_text()) if restarted else None


def head(args, device) -> dict:
    """Return what rank 0 begins with; after a restart with what was found before, the case that ended it as failed."""
    result = earlier(args)
    if result is not None:
        if result["under_way"]:
            said = "FAILED: a rank ended or time was up, see above"
            row = {"case": result["under_way"], "well": False, "result": said}
            result["rows"].append(row)
            print(line(row), flush=True)
        return result
    import torch.distributed as dist

    world, backend = int(os.environ["WORLD_SIZE"]), dist.get_backend()
    result = describe("bit_parity")
    result["command"] = result["command"].replace("python", f"torchrun --nproc_per_node {world}", 1)
    sizes = {part: vars(SIZES[device.type, part]) for part in ("parity", "features")}
    more = {
        "ranks": world,
        "device": device.type,
        "backend": backend,
        "dtype": "bf16",
        "steps": args.steps,
        "sizes": sizes,
    }
    hardware = result["hardware"]
    print(f"{world} x {hardware['gpu'] if device.type == 'cuda' else hardware['cpu']}, {result['versions']}")
    print(f"{'case':<36}{'time':>8}  {'loss, mean of ranks':<20}  result", flush=True)
    return {**result, **more, "records": {}, "rows": [], "under_way": None}


def line(row: dict) -> str:
    losses = f"{row['losses'][0]:.5f} -> {row['losses'][-1]:.5f}" if "losses" in row else ""
    return f"{row['case']:<36}{row.get('seconds', 0):>6.1f} s  {losses:<20}  {row['result']}"


def run_all(args) -> bool:
    """Every case; whether all are well. Rank 0 prints a line and writes the file after each."""
    device, control = join(args)
    import torch.distributed as dist

    first = dist.get_rank() == 0
    cases = chosen_cases(args)
    # Ranks learn from rank 0 what was done before a restart, records to compare with among it.
    result = gathered(head(args, device) if first else None, control)[0]
    records, rows = result["records"], result["rows"]
    done = {row["case"] for row in rows}
    for case in cases:
        if case.name in done:
            continue
        result["under_way"] = case.name
        if first:
            write(result, args.out)
        row = {"case": case.name, "part": case.part, "equal_to": case.equal_to}
        row |= one(case, args, device, control, records)
        rows.append(row)
        if first:
            print(line(row), flush=True)
            if case.part == "features" and "losses" in row:
                print("    " + " ".join(f"{loss:.4f}" for loss in row["losses"]), flush=True)
    well = all(row["well"] for row in rows)
    if first:
        del result["under_way"], result["records"]
        write(result, args.out)
        seconds = sum(row.get("seconds", 0) for row in rows)
        print(f"{sum(row['well'] for row in rows)} of {len(rows)} cases are well; {seconds:.0f} s", flush=True)
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
    return well


def one(case: Case, args, device, control, records: dict) -> dict:
    """Run a case on all ranks together; what its row says. Its record goes into `records`."""
    faulthandler.dump_traceback_later(args.case_timeout, exit=True)
    rank = int(os.environ["RANK"])
    found, start = forget_case(device), time.perf_counter()
    folder = gathered(tempfile.mkdtemp() if rank == 0 else None, control)[0]
    error = record = None
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the table of every engine
            record = run_case(case, args, device, folder)
    except Exception as raised:
        error = f"rank {rank}: {traceback.format_exception_only(raised)[-1].strip()}"
        # Now: were this the only rank that raised, the next lines would end it.
        print(f"--- {case.name}, rank {rank}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    outcomes = gathered((error, record), control)
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    row = {"seconds": time.perf_counter() - start, "found_gib": found / 2**30}
    errors = [error for error, _ in outcomes if error]
    if errors:
        return {**row, "well": False, "result": f"FAILED {errors[0]}"}
    whole = joined([record for _, record in outcomes])
    records[case.name] = whole
    row |= {"losses": means(whole), "norms": [step[0] for step in whole["norms"]]}
    row["weights_sha256"] = hashlib.sha256("".join(whole["weights"].values()).encode()).hexdigest()
    try:
        return {**row, "well": True, "result": judge(case, whole, records)}
    except AssertionError as wrong:
        return {**row, "well": False, "result": f"FAILED {wrong}"}


def write(result: dict, path: str) -> None:
    """All of it at once, so that a reader never finds half a file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    part = Path(path + ".part")
    write_result(part, result | {"finished": "under_way" not in result})
    part.replace(path)


def main() -> None:
    args = parse()
    before = earlier(args)
    if before is not None and "under_way" not in before:  # all was done: the ranks ended with 1 because a case failed
        sys.exit(1)
    sys.exit(0 if run_all(args) else 1)


if __name__ == "__main__":
    main()
