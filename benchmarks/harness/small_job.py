"""A tiny job with everything in it that a training does, for who looks at its whole life: faults, growth."""

from __future__ import annotations

from zeropp_fp8.config import RECIPES

# Recipes, and with hpZ those that do not have it.
WAYS = {name: (name, {}) for name in RECIPES}
WAYS |= {
    f"{name}+hpZ": (name, {"secondary": {"scope": "node"}}) for name in RECIPES if "secondary" not in RECIPES[name]
}
VOCABULARY = 64


def engine_of(way: str, ranks: int):
    """An engine over a tiny Llama in bf16, with LoRA where weights are frozen; the ranks count as two nodes."""
    from tests.models import ds_config, llama, make_engine, section

    recipe, fields = WAYS[way]
    model = llama(vocab=VOCABULARY, attn_implementation="eager")
    if "frozen" in RECIPES[recipe]:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    config = ds_config(section(recipe, ranks_per_node=max(1, ranks // 2), **fields), "bf16")
    return make_engine(model, config, lr=1e-2)


def step_of(engine, tokens) -> float:
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


def evaluate(engine, tokens) -> float:
    import torch

    engine.eval()
    with torch.no_grad():
        loss = engine(input_ids=tokens, labels=tokens).loss.item()
    engine.train()
    return loss


def generate(engine, tokens) -> list[int]:
    import zeropp_fp8

    with zeropp_fp8.generation(engine) as model:
        options = {"attention_mask": tokens.new_ones(tokens.shape), "pad_token_id": 0, "eos_token_id": None}
        return model.generate(tokens, max_new_tokens=4, do_sample=False, **options)[0].tolist()
