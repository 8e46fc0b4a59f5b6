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
    from zeropp_fp8.kernels.linear.quantized_linear import QuantizedLinear, QuantizedStack

    zeropp_fp8.enable()
    deepspeed.init_distributed()
    recipe, compute, dtype, adapters = sys.argv[1:]
    fields = {"compute": {"format": compute, "scaling": "current"}} if compute != "none" else {}
    config = ds_config(section(recipe, ranks_per_node=1, **fields), dtype)
    if adapters == "mixture":
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(0)
        experts = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "intermediate_size": 256}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
        sizes = {"num_hidden_layers": 3, "hidden_size": 512, "vocab_size": 1024, "pad_token_id": None}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**experts, **heads, **sizes))
    else:
        model = llama(layers=3, hidden=512, vocab=1024, intermediate=1024)
    if recipe == "qlora":
        torch.manual_seed(3)
        targets = ["q_proj", "v_proj"] if adapters == "mixture" else ["q_proj", "v_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=8, target_modules=targets, init_lora_weights=False))
        if adapters == "several":
            second = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
            model.add_adapter("second", second)
            model.base_model.set_adapter(["default", "second"])
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

    def greedy(model):
        return model.generate(input_ids=tokens, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)

    multiplied, launch = [], QuantizedLinear.launch  # for each product with codes, whether LoRA was in its kernel

    def watched(layer, *tensors):
        multiplied.append(layer.lora is not None)
        launch(layer, *tensors)

    QuantizedLinear.launch = watched
    through_stacks, multiply = [], QuantizedStack.__call__

    def watched_stack(stack, *tensors):
        through_stacks.append(1)
        return multiply(stack, *tensors)

    QuantizedStack.__call__ = watched_stack
    losses, found = [train() for _ in range(3)], {}
    for rows in (tokens, tokens[:, :1]):  # 128 rows are multiplied with decoded weights, 4 with codes
        engine.module.eval()
        with torch.no_grad():
            expected = engine.module(rows).logits.float()
        expected_tokens = greedy(engine.module)
        engine.module.train()
        ways = [("values", False, False), ("values", True, False), ("codes", True, False), ("sharded", True, False)]
        for weights, merge, graph in (*ways, ("values", True, True), ("codes", True, True)):
            before = memory()
            with zeropp_fp8.generation(engine, weights=weights, merge_adapters=merge, graph=graph) as kept:
                held = memory() - before
                with torch.no_grad():
                    logits = kept(rows).logits.float()
                multiplied.clear()
                through_stacks.clear()
                made = greedy(kept)
                stacks = len(through_stacks)
                if graph:  # a graph of its own, after a pass that decodes what the first one's step did
                    in_one = list(multiplied)
                    with torch.no_grad():
                        kept(tokens)
                    assert torch.equal(greedy(kept), made), "a second sequence"
                    multiplied[:] = in_one
                error = float((logits - expected).norm() / expected.norm())
                shape, same = list(made.shape), torch.equal(made, expected_tokens)
                del logits, made
            grown = memory() - before
            found[f"{weights}, {merge}, {rows.shape[1]}{', graph' if graph else ''}"] = {
                "error": error,
                "held": held,
                "grown": grown,
                "shape": shape,
                "same_tokens": same,
                "stacks": stacks,
                "in_codes": [multiplied.count(False), multiplied.count(True)],
            }
    losses += [train() for _ in range(2)]
    print("RESULT " + json.dumps({"losses": losses, "found": found}))
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
