"""One rank, one GPU: generation in every way inside an engine that trains; prints what was found as JSON."""

import gc
import json
import os
import socket
import sys

import torch


def main():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(alone)
    import deepspeed
    from models import ds_config, llama, make_engine, section
    from peft import LoraConfig, get_peft_model

    import zeropp_fp8

    zeropp_fp8.enable()
    deepspeed.init_distributed()
    recipe, compute = sys.argv[1], sys.argv[2]
    fields = {"compute": {"format": compute, "scaling": "current"}} if compute != "none" else {}
    config = ds_config(section(recipe, ranks_per_node=1, **fields), "bf16")
    model = llama(layers=3, hidden=512, vocab=1024, intermediate=1024)
    if recipe == "qlora":
        torch.manual_seed(3)
        targets = ["q_proj", "v_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=8, target_modules=targets, init_lora_weights=False))
    engine = make_engine(model, config)
    tokens = torch.randint(1024, (4, 32), generator=torch.Generator().manual_seed(1)).cuda()

    def train():
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    def memory():
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    losses, found = [train() for _ in range(3)], {}
    for rows in (tokens, tokens[:, :1]):  # 128 rows are multiplied with decoded weights, 4 with codes
        engine.module.eval()
        with torch.no_grad():
            expected = engine.module(rows).logits.float()
        engine.module.train()
        for weights, merge in (("values", False), ("values", True), ("codes", True), ("sharded", True)):
            before = memory()
            with zeropp_fp8.generation(engine, weights=weights, merge_adapters=merge) as kept:
                held = memory() - before
                with torch.no_grad():
                    logits = kept(rows).logits.float()
                made = kept.generate(input_ids=tokens, max_new_tokens=8, do_sample=False, pad_token_id=0)
                error = float((logits - expected).norm() / expected.norm())
                shape = list(made.shape)
                del logits, made
            grown = memory() - before
            found[f"{weights}, {merge}, {rows.shape[1]}"] = {
                "error": error,
                "held": held,
                "grown": grown,
                "shape": shape,
            }
    losses += [train() for _ in range(2)]
    print("RESULT " + json.dumps({"losses": losses, "found": found}))
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
