"""Jobs that look at an engine's weights in the middle of training: saves, gathers for writing that write nothing."""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import Mlp, llama
from recipes import section_of
from running import Spec, backward, forward, on_engine, run, see, shared_folder, step, update

STORED = {"modules": "frozen", "format": "nf4", "block_size": 32}


def nothing(engine, folder):
    """Do nothing: others are compared with it."""


def gather_for_writing(engine, folder):
    """Look as transformers, PEFT and accelerate do: gather each module's parameters, as if to write them."""
    import deepspeed

    for module in engine.module.modules():
        with deepspeed.zero.GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
            pass


def gather_all_for_writing(engine, folder):
    """All at once, and rank 0 writes the numbers that are there."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            for param in engine.module.parameters():
                param.data.copy_(param.data.clone())


def look_at_states(engine, folder):
    """DeepSpeed's calls for debugging."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    for param in engine.module.parameters():
        if param.requires_grad:
            safe_get_full_fp32_param(param)
            safe_get_full_optimizer_state(param, "exp_avg")


def last_layers_first(engine, folder):
    """Evaluate layers by themselves, in another order than training gathers them."""
    model = engine.module.model
    hidden = torch.zeros(1, 2, engine.module.config.hidden_size, dtype=engine.module.dtype)
    positions = model.rotary_emb(hidden, torch.arange(2)[None])
    with torch.no_grad():
        for layer in reversed(model.layers):
            layer(hidden, position_embeddings=positions)


LOOKS = {
    "save_16bit_model": lambda engine, folder: engine.save_16bit_model(folder),
    "save_checkpoint": lambda engine, folder: engine.save_checkpoint(folder),
    "last layers first": last_layers_first,
    "module by module": gather_for_writing,
    "all at once": gather_all_for_writing,
    "states": look_at_states,
}


def looks(way, looks, dtype="fp32"):
    """{look: trace} of the same training with some of LOOKS, or "nothing", in its middle.

    `way`: of WAYS, or "stored".
    """
    section = section_of("zeropp", frozen=STORED) if way == "stored" else section_of(way)

    def model():
        made = llama()
        for name, param in made.named_parameters():
            param.requires_grad_("frozen" not in section or "mlp" not in name)
        return made

    spec = Spec(section, dtype, {"gradient_accumulation_steps": 2}, model)
    folder, found = shared_folder(), {}
    for name in looks:
        look = on_engine(LOOKS.get(name, nothing), folder)
        # Between steps, and between the micro-batches of one, which compute with one copy.
        events = [step, step, look, step, look, step, forward, backward, look, update, look, step]
        found[name] = run(spec, events, ("weights",))
    return found


def write_and_read(engine):
    """Names of weights, gradients and states that are not what was written."""
    from deepspeed import utils

    wrong = []
    for name, param in engine.module.named_parameters():
        values = torch.arange(1.0, param.ds_numel + 1).view(param.ds_shape) / 4
        utils.safe_set_full_fp32_param(param, values)
        utils.safe_set_full_optimizer_state(param, 2 * values, "exp_avg")
        utils.safe_set_full_grad(param, 3 * values)
        utils.safe_update_full_grad_vectorized([param], lambda full, _, more=values: full + more)
        found = {
            "weight": (utils.safe_get_full_fp32_param(param), values),
            "state": (utils.safe_get_full_optimizer_state(param, "exp_avg"), 2 * values),
            "gradient": (utils.safe_get_full_grad(param), 4 * values),
        }
        wrong += [f"{what} of {name}" for what, (got, expected) in found.items() if not torch.equal(got, expected)]
    return wrong


def written_and_read(ways):
    """{way: names of what is wrong} of odd sizes, which are padded on the last rank."""
    found, data = {}, [(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))] * 2
    for way in ways:
        spec = Spec(section_of(way, compute={"format": "none"}), model=lambda: Mlp(hidden=3, layers=2))
        # From the first step on stock's optimizer has states.
        (found[way],) = run(spec, [step, forward, backward, see(write_and_read)], data=data).seen
    return found
