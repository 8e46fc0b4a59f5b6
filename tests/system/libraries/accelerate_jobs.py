"""Loops with Accelerate on ranks: what a script asks of one, and two models with two DeepSpeed plugins."""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import batches, ds_config, full_fp32_weights, llama
from running import loss_of
from trainer_feature_jobs import _section
from trainer_jobs import tell_accelerate

import zeropp_fp8

ACCUMULATION = 2


def _plugin(way):
    from accelerate import DeepSpeedPlugin

    config = ds_config(_section(way), gradient_accumulation_steps=ACCUMULATION, gradient_clipping=0.5)
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return DeepSpeedPlugin(hf_ds_config=config)


def _start(parallelism_config=None, **plugins):
    """A new Accelerator with plugins of these ways, the first of them selected."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    for state in (AcceleratorState, GradientState):
        state._reset_state()
    tell_accelerate()
    zeropp_fp8.enable() if any(plugins.values()) else zeropp_fp8.disable()
    plugins = {name: _plugin(way) for name, way in plugins.items()}
    return Accelerator(deepspeed_plugins=plugins, parallelism_config=parallelism_config)


def _with_optimizer(model):
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _prepared(accelerator, model):
    return accelerator.prepare(*_with_optimizer(model))


def _step(accelerator, model, optimizer, tokens, extra=0.0):
    with accelerator.accumulate(model):
        loss = loss_of(model, tokens) + extra
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else None
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), accelerator.sync_gradients, norm


def _batches(n):
    return batches(n, dist.get_rank())


def loops(ways, folder):
    return {way: _loop(way, f"{folder}/{way}") for way in ways}


def _loop(way, folder):
    """A loop that accumulates, clips, saves its state after half of it, and does the second half again."""
    accelerator = _start(only=way)
    model, optimizer = _prepared(accelerator, llama(tie=True))
    tokens = list(_batches(8))
    found = {"first": [_step(accelerator, model, optimizer, each) for each in tokens[:4]]}
    accelerator.save_state(folder)
    found["second"] = [_step(accelerator, model, optimizer, each) for each in tokens[4:]]
    weights = accelerator.get_state_dict(model)
    exact = full_fp32_weights(accelerator.unwrap_model(model))
    accelerator.load_state(folder)
    found["again"] = [_step(accelerator, model, optimizer, each) for each in tokens[4:]]
    found["unwrapped"] = type(accelerator.unwrap_model(model)).__name__, type(model).__module__.partition(".")[0]
    if accelerator.is_main_process:  # others get no weights, as in stock
        found["state dict"] = sorted(weights) == sorted(accelerator.unwrap_model(model).state_dict())
        found["same"] = all(torch.equal(weights[name].float(), weight) for name, weight in exact.items())
    return found


def sequence_parallel(way):
    """Losses and bytes of activations of two ranks that share each sequence (ALST), by ParallelismConfig.

    Once in a process: DeepSpeed's groups for it, and its attention in place of transformers', are there for good.
    """
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    shared = ParallelismConfig(
        sp_backend="deepspeed",
        sp_size=2,
        sp_handler=DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"),
    )
    accelerator = _start(parallelism_config=shared, only=way)
    tokens = [row for each in batches(6, rank=0) for row in each]  # the same on both; each is given its half of a row
    rows = [{"input_ids": row, "labels": row, "position_ids": torch.arange(len(row))} for row in tokens]
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    model, optimizer, loader = accelerator.prepare(*_with_optimizer(llama()), loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            logits, labels = model(**batch).logits, batch["shift_labels"]
            own = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            group = model.seq_parallel_group
            parts = torch.distributed.nn.functional.all_gather(torch.stack([own, (labels != -100).sum()]), group=group)
            summed, counted = sum(parts)
            accelerator.backward(summed / counted)
            optimizer.step()
            optimizer.zero_grad()
        losses.append((summed / counted).item())
    return losses, zeropp_fp8.wire_report(model)["per_step"]["activations"] if way else None


def two_models(pairs):
    """{(way of the student, way of the teacher): losses}, of a teacher that does not train, then of two that do."""
    return {pair: (_taught(*pair), _both(*pair)) for pair in pairs}


def _taught(student_way, teacher_way):
    accelerator = _start(student=student_way, teacher=teacher_way)
    student, optimizer = _prepared(accelerator, llama())
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(llama(seed=1))
    teacher.eval()
    accelerator.state.select_deepspeed_plugin("student")
    losses = []
    for tokens in _batches(6):
        with torch.no_grad():
            extra = loss_of(teacher, tokens)
        losses.append((extra.item(), *_step(accelerator, student, optimizer, tokens, extra)[:2]))
    return losses


def _both(first_way, second_way):
    from accelerate import Accelerator

    accelerators = [_start(first=first_way, second=second_way), Accelerator()]
    models = [_prepared(accelerators[0], llama())]
    accelerators[1].state.select_deepspeed_plugin("second")
    models.append(_prepared(accelerators[1], llama(seed=1)))
    return [
        [_step(accelerator, *model, tokens)[0] for accelerator, model in zip(accelerators, models)]
        for tokens in _batches(6)
    ]
