"""Jobs about how weights get into a frozen store: from checkpoints, by PEFT, by the Trainer and Accelerate."""

from __future__ import annotations

import torch
import torch.distributed as dist
from frozen_jobs import TARGETS
from frozen_models import (
    DTYPES,
    codes,
    config_of,
    decoded,
    evaluate,
    gathered,
    hugging_face_knows,
    rounded,
    same,
    with_adapters,
)
from models import batches, build, llama, make_engine, train
from running import switch

from benchmarks.harness.host_memory import PeakOfMemory
from zeropp_fp8.zero.frozen.store import stored_weight

# -- loading ---------------------------------------------------------------------------------------------------------


def memory_of_loading(folder, fields):
    """Peak while a checkpoint is loaded and an engine is made, and what rests then, in bytes of 16-bit weights."""
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import AutoModelForCausalLM

    switch(True)
    config = config_of(fields, "bf16")
    with hugging_face_knows(config), PeakOfMemory() as memory:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        engine = make_engine(with_adapters(model), config)
    whole = sum(2 * p.ds_numel for p in engine.module.parameters())
    rests = sum(p.ds_tensor.numel() * p.ds_tensor.element_size() for p in engine.module.parameters())
    return memory.peak / whole, rests / whole, len(codes(engine.module))


def loaded(folder, dtype, fields):
    """A checkpoint that streams in under zero.Init, one that is there before, and PEFT before and after."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    switch(True)
    config, log = config_of(fields, dtype), {}
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).state_dict()

    with hugging_face_knows(config):
        streamed = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
        classifier = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=DTYPES[dtype], num_hidden_layers=3
        )
    log["stored while loading"] = sorted(codes(streamed))
    log["stored of a classifier"] = sorted(codes(classifier))
    fresh = [weight.float().std().item() for name, weight in decoded(classifier).items() if "layers.2" in name]
    log["what no checkpoint has"] = min(fresh), max(fresh)
    log["equal to encoding"] = same(decoded(streamed), {n: rounded(weights[n], fields) for n in codes(streamed)})
    with gathered(streamed):
        log["others are exact"] = all(
            torch.equal(p, weights[n]) for n, p in streamed.named_parameters() if not stored_weight(p)
        )

    plain_model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    kinds = {"streamed": with_adapters(streamed), "whole": with_adapters(plain_model)}
    kinds["made with adapters"] = build(lambda: with_adapters(llama()), config, zero_init=True)
    for kind, model in kinds.items():
        engine = make_engine(model, config, lr=1e-2)
        before = codes(model)
        losses = train(engine, 3)
        log[kind] = {
            "losses": losses,
            "codes": before,
            "unchanged": same(before, codes(model)),
            "dtypes": {stored_weight(p).dtype for p in model.parameters() if stored_weight(p)},
            "not stored": sorted({n.split(".")[-2] for n, p in model.named_parameters() if not stored_weight(p)}),
        }
    return log


def several_adapters(folder, adapter_folder):
    """A loaded adapter that stays frozen beside a trained one, a layer that is trained whole, merges one by one."""
    from peft import LoraConfig, PeftModel
    from transformers import AutoModelForCausalLM

    switch(True)
    fields = {"format": "int8", "block_size": 16}
    config, log = config_of(fields, "bf16"), {}
    if dist.get_rank() == 0:
        first = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        first = with_adapters(first, modules_to_save=["k_proj"])
        first.save_pretrained(adapter_folder)
        saved = {n: p.clone() for n, p in first.named_parameters() if ".default." in n}
    dist.barrier()
    with hugging_face_knows(config):
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model = PeftModel.from_pretrained(base, adapter_folder, adapter_name="loaded", autocast_adapter_dtype=False)
        torch.manual_seed(4)
        trained = LoraConfig(
            r=4, target_modules=TARGETS, init_lora_weights=False, modules_to_save=["lm_head", "o_proj"]
        )
        model.add_adapter("trained", trained, autocast_adapter_dtype=False)
        model.set_adapter("trained")
    engine = make_engine(model, config, lr=1e-2)
    before = codes(model)
    train(engine, 4)
    log["stored"] = sorted(before)
    log["loaded adapter"] = sorted(
        {(p.dtype, p.ds_tensor.dtype, p.requires_grad) for n, p in model.named_parameters() if ".loaded." in n}, key=str
    )
    log["trained"] = sorted(
        {n.split(".")[-3 if "lora" in n else -4] for n, p in model.named_parameters() if p.requires_grad}
    )
    with gathered(model):
        if dist.get_rank() == 0:
            loaded_now = {n.replace(".loaded.", ".default."): p for n, p in model.named_parameters() if ".loaded." in n}
            log["loaded is as saved"] = same(loaded_now, saved)
    losses = [evaluate(engine)]
    for name in ("trained", "loaded"):
        with gathered(model, modifier_rank=0):
            model.merge_adapter([name])
        losses.append(evaluate(engine))
    with gathered(model, modifier_rank=0):
        model.unmerge_adapter()
    losses.append(evaluate(engine))
    log["merged one by one"] = losses
    log["unchanged"] = same(before, codes(model))
    return log


# -- Trainer and Accelerate ------------------------------------------------------------------------------------------


class _Tokens(torch.utils.data.Dataset):
    def __init__(self, rows=128):
        self.rows = [row for tokens in batches(rows // 4, rank=0, batch=4) for row in tokens]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def _adapter_as_saved(model, folder):
    """Whether the adapter that was saved is the one that was trained, bit for bit in its dtype."""
    from peft import load_peft_weights

    with gathered(model):
        trained = {n.replace(".default", ""): p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
    saved = load_peft_weights(folder, device="cpu")
    return sorted(saved) == sorted(trained) and all(torch.equal(saved[n].to(w.dtype), w) for n, w in trained.items())


def with_trainer(folder, output, dtype, fields):
    """A script for the Trainer with nothing of the plugin in it but the ds_config."""
    from accelerate.state import DistributedType, PartialState
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    # Accelerate looks for an accelerator before it allows DeepSpeed; on a CPU it has to be told.
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)
    switch(True)
    config = config_of(fields, dtype)
    config["train_micro_batch_size_per_gpu"] = config["gradient_clipping"] = "auto"
    arguments = TrainingArguments(
        output_dir=output,
        deepspeed=config,
        use_cpu=True,
        bf16=dtype == "bf16",
        fp16=dtype == "fp16",
        max_steps=8,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        learning_rate=2e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        seed=0,
        disable_tqdm=True,
        optim="adamw_torch",
        gradient_checkpointing=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    before = codes(model)
    trainer = Trainer(model=model, args=arguments, train_dataset=_Tokens(), eval_dataset=_Tokens(16))
    trainer.train()
    log = {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}
    log["stored"], log["unchanged"] = sorted(before), same(before, codes(model))
    log["loss after training"] = trainer.evaluate()["eval_loss"], evaluate(trainer.model_wrapped)
    trainer.save_model(output)
    dist.barrier()
    log["adapter as saved"] = _adapter_as_saved(model, output)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]), output)
    log["loss after loading"] = evaluate(make_engine(again, config_of(fields, dtype), optimizer=None))
    return log


def with_accelerate(folder, output, dtype, fields):
    """A loop of the user's own with Accelerate."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import DistributedType, PartialState
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM

    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)
    switch(True)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config_of(fields, dtype)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype])
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # as scripts for QLoRA do
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    before = codes(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    loader = torch.utils.data.DataLoader(_Tokens(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _, batch in zip(range(8), loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    bare = accelerator.unwrap_model(model)
    with gathered(bare):
        if accelerator.is_main_process:
            bare.save_pretrained(output)
    accelerator.wait_for_everyone()
    unchanged = same(before, codes(bare))
    return {
        "losses": losses,
        "stored": sorted(before),
        "unchanged": unchanged,
        "adapter as saved": _adapter_as_saved(bare, output),
    }
