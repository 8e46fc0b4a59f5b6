"""A trainer on the first GPU that hands over to a stand-in process on the second, over NCCL; prints what it found.

PYTHONPATH=.:tests python tests/gpu/handover_script.py FOLDER [RESULT.json]
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

import deepspeed
from models import ds_config, llama, section
from stand_in import Trainer

import zeropp_fp8
from benchmarks.harness.environment import describe
from benchmarks.harness.results import write_result
from zeropp_fp8.handover import Changes, FolderTransfer, Transfer, WeightSource
from zeropp_fp8.receiving import Receiver, catch_up


def engine_of():
    from peft import LoraConfig, get_peft_model

    model = llama(layers=12, hidden=512, intermediate=1024, vocab=1024)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    config = ds_config(section("lossless", ranks_per_node=1), "bf16")
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def changes(engine, step):
    """Elements that came in two hand-overs, and whether a copy has every bit after each."""
    source, held, found = WeightSource(engine), {}, []
    brought = Changes(source)
    for _ in range(2):
        came = 0
        for name, shape, indices, values in itertools.chain.from_iterable(brought):
            kept = held.setdefault(name, torch.zeros(shape, dtype=values.dtype, device=values.device))
            kept.view(-1)[indices.long()] = values
            came += len(indices)
        same = all(torch.equal(held[n].view(torch.uint8), t.view(torch.uint8)) for n, t in source)
        found.append((came, same))
        step()
    return found


def through_a_folder(engine, step, folder):
    """Whether weights on the second GPU have every bit after each of two versions, and the bytes of the second."""
    source, receiver, found = WeightSource(engine), Receiver(device="cuda:1"), []
    transfer = FolderTransfer(source, Path(folder))
    for version in (1, 2):
        transfer.send_weights()
        there = catch_up(Path(folder), receiver) == version
        held = {name: tensor.cpu() for name, tensor in receiver.weights.items()}
        same = all(torch.equal(held[n].view(torch.uint8), t.cpu().view(torch.uint8)) for n, t in source)
        found.append(there and same)
        step()
    return found, sum(path.stat().st_size for path in Path(folder).glob("00000002-*"))


def main(folder, out=None):
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    torch.cuda.set_device(0)
    zeropp_fp8.enable()
    engine, found = engine_of(), {}
    tokens = torch.randint(1024, (2, 32), device="cuda")

    def step():
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    step()
    ways = {"merged": {}, "fp8": {"format": "fp8"}, "adapters": {"weights": "adapters"}}
    for number, (way, options) in enumerate(ways.items()):
        address, file = f"{folder}/socket{number}", f"{folder}/held{number}.pt"
        script = Path(__file__).parents[1] / "stand_in.py"
        command = [sys.executable, str(script), address, "key", "cuda:1", file]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            assert process.stdout.readline() == b"listening\n"
            source = WeightSource(engine, **options)
            transfer = Transfer(source, Trainer(address, b"key"), "127.0.0.1")
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            transfer.send_weights()
            grown = torch.cuda.max_memory_allocated() - before
            first = transfer.sent_bytes
            step()
            transfer.send_weights()
            held = torch.load(file)
            expected = {name: tensor.cpu().clone() for name, tensor in WeightSource(engine, **options)}
        finally:
            process.kill()
            process.wait()
        there = {name: tensor.cpu() for name, tensor in held["held"].items()}
        same = [torch.equal(there[n].view(torch.uint8), t.view(torch.uint8)) for n, t in expected.items()]
        found[way] = {
            "equal": all(same) and there.keys() == expected.keys() and held["version"] == 2,
            "first": first,
            "after a step": transfer.sent_bytes - first,
            "all": sum(tensor.nbytes for tensor in expected.values()),
            "grown": grown,  # of the trainer's memory, while it sends; what went last stays
            "model": sum(p.ds_numel * 2 for p in engine.module.parameters()),
        }
    found["changes"] = changes(engine, step)
    found["folder"] = through_a_folder(engine, step, f"{folder}/weights")
    print("RESULT " + json.dumps(found))
    if out:
        del found["changes"], found["folder"]
        command = "python tests/gpu/handover_script.py FOLDER RESULT.json"
        rows = [{"run": way, **of_way} for way, of_way in found.items()]
        write_result(out, {**describe("handover"), "command": command, "finished": True, "rows": rows})


if __name__ == "__main__":
    main(*sys.argv[1:])
