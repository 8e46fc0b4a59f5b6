"""Jobs about a frozen store in the flows of users: loading, PEFT, merging, Trainer, Accelerate and bad input."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import threading
import time

import torch
import torch.distributed as dist
from frozen_jobs import TARGETS, load_into, wire_format_of
from models import batches, build, ds_config, full_fp32_weights, llama, make_engine, section, train
from parity_jobs import allow_fp16_on_cpu, switch

from zeropp_fp8.zero.frozen_store import stored_weight

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def plain(name):
    """The name that a parameter has in the model without PEFT."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".original_module", "")


def with_adapters(model, **options):
    """LoRA adapters of the model's dtype, whose effect is not zero from the start."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    options = {"r": 4, "target_modules": TARGETS, "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(**options), autocast_adapter_dtype=False)


def codes(model):
    """{plain name: this rank's payload} of stored parameters."""
    return {plain(n): p.ds_tensor.detach().clone() for n, p in model.named_parameters() if stored_weight(p)}


def same(these, those):
    return sorted(these) == sorted(those) and all(torch.equal(these[n], those[n]) for n in these)


def decoded(model):
    """{plain name: what all ranks' payloads decode to} of stored parameters, with nothing gathered by the plugin."""
    numbers = {}
    for name, param in model.named_parameters():
        stored = stored_weight(param)
        if stored is not None:
            rows = [torch.empty_like(param.ds_tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, param.ds_tensor.detach())
            flat = stored.wire_format.decode_rows(torch.stack(rows), stored.part_numel, stored.dtype).view(-1)
            numbers[plain(name)] = flat[: param.ds_numel].view(param.ds_shape)
    return numbers


def rounded(weight, fields):
    """What the codes of a whole weight decode to."""
    wire_format = wire_format_of(fields)
    return wire_format.decode(wire_format.encode(weight), weight.shape, weight.dtype)


@torch.no_grad()
def evaluate(engine):
    """The loss on one batch of this rank's own."""
    engine.eval()
    tokens = next(batches(1, dist.get_rank(), seed=9))
    loss = float(engine(input_ids=tokens, labels=tokens).loss)
    engine.train()
    return loss


def attempt(call):
    """The message of what a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def gathered(model, modifier_rank=None):
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=modifier_rank)


@contextlib.contextmanager
def hugging_face_knows(config):
    """What TrainingArguments(deepspeed=...) does to from_pretrained and PEFT."""
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    kept = HfDeepSpeedConfig(config)
    yield kept
    unset_hf_deepspeed_config()


def config_of(fields, dtype="fp32", ranks_per_node=None, overrides=None, **more):
    if dtype == "fp16":
        allow_fp16_on_cpu()
    ranks_per_node = ranks_per_node or (2 if dist.get_world_size() % 2 == 0 else 1)
    return ds_config(section("lossless", ranks_per_node, frozen=fields, **more), dtype, **(overrides or {}))


# -- loading ---------------------------------------------------------------------------------------------------------


class PeakOfMemory:
    """The most anonymous memory of this process in a block, in bytes above what it had before.

    Pages of a mapped checkpoint are not anonymous. Blocks from 64 KiB are given back to the system at once.
    """

    def __enter__(self):
        ctypes.CDLL(None).mallopt(-3, 64 * 1024)  # M_MMAP_THRESHOLD of glibc
        gc.collect()
        self._start = self.peak = self._now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    @staticmethod
    def _now():
        with open("/proc/self/statm") as statm:
            _, resident, shared, *_ = statm.read().split()
        return (int(resident) - int(shared)) * mmap.PAGESIZE

    def _watch(self):
        while not self._over.is_set():
            self.peak = max(self.peak, self._now())
            time.sleep(0.001)

    def __exit__(self, *exc):
        self._over.set()
        self._thread.join()
        self.peak -= self._start


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


# -- merging ---------------------------------------------------------------------------------------------------------


def as_trl_reads(model):
    """{name: weight} that TRL hands to a generation engine while a merged PEFT model is gathered."""
    weights = {}
    for name, param in model.named_parameters():
        name = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if model.prefix in name or "original_module" in name:
            continue
        weights[name.replace("modules_to_save.default.", "")] = param.data.clone()
    return weights


def adapted_layers(model):
    """{name of its weight: PEFT layer}."""
    return {plain(n) + ".weight": m for n, m in model.named_modules() if hasattr(m, "base_layer")}


def merge_and_unmerge(fields, dtype="fp32", safe_merge=False, use_dora=False, overrides=None, **more):
    """Merging in one context and over two, and training that goes on as if nothing had been merged."""
    import deepspeed

    switch(True)
    config = config_of(fields, dtype, overrides=overrides, **more)

    def an_engine():
        model = build(llama, config, zero_init=True)
        with hugging_face_knows(config):  # DoRA reads the base weight
            model = with_adapters(model, use_dora=use_dora)
        return make_engine(model, config, lr=1e-2)

    undisturbed = an_engine()
    wanted = train(undisturbed, 2) + train(undisturbed, 2, seed=2)
    engine = an_engine()
    model, losses = engine.module, train(engine, 2)
    before, numbers, unmerged_loss = codes(model), decoded(model), evaluate(engine)
    log = {}

    with gathered(model):  # TRL: gather, merge, sync, unmerge
        layers = adapted_layers(model)
        log["shows what codes decode to"] = all(
            torch.equal(p, numbers[plain(n)]) for n, p in model.named_parameters() if stored_weight(p)
        )
        if not use_dora:
            merged = {n: numbers[n].float() + layer.get_delta_weight("default") for n, layer in layers.items()}
        model.merge_adapter(safe_merge=safe_merge)
        synced = as_trl_reads(model)
        model.unmerge_adapter()
    if not use_dora:
        close = {"fp32": 1e-6, "bf16": 2**-8}[dtype]
        log["merged"] = all(torch.allclose(synced[n].float(), merged[n], rtol=close, atol=1e-7) for n in merged)
    log["changed by merging"] = sorted(n for n in numbers if not torch.equal(synced[n], numbers[n]))
    log["after one context"] = same(before, codes(model)), evaluate(engine) == unmerged_loss

    for block in model.get_base_model().model.layers:  # a layer at a time
        with gathered(block):
            for layer in (m for m in block.modules() if hasattr(m, "merge")):
                layer.merge(safe_merge=safe_merge)
                layer.unmerge()
    for name, param in model.named_parameters():  # a parameter at a time
        with deepspeed.zero.GatheredParameters([param]):
            if stored_weight(param):
                log["parameter by parameter"] = log.get("parameter by parameter", True) and torch.equal(
                    param, numbers[plain(name)]
                )
    log["after layers"] = same(before, codes(model)), evaluate(engine) == unmerged_loss

    with gathered(model, modifier_rank=0):
        model.merge_adapter(safe_merge=safe_merge)
    log["codes changed"] = sorted(n for n, code in codes(model).items() if not torch.equal(code, before[n]))
    log["requantized"] = all(
        torch.equal(w, rounded(synced[n], fields)) for n, w in decoded(model).items() if n in layers
    )
    log["losses around"] = unmerged_loss, evaluate(engine)
    with gathered(model, modifier_rank=0):
        pass
    log["merged stays"] = evaluate(engine) == log["losses around"][1]
    with gathered(model, modifier_rank=0):
        model.unmerge_adapter()
    log["after two contexts"] = same(before, codes(model)), evaluate(engine) == unmerged_loss

    losses += train(engine, 2, seed=2)
    log["training goes on"] = losses == wanted, same(before, codes(model))
    return log


def merge_and_unload(fields, folder):
    """A merged model without adapters: saved inside the context, and kept in the store."""
    from transformers import AutoModelForCausalLM

    switch(True)
    config, log = config_of(fields), {}

    def an_engine():
        engine = make_engine(with_adapters(build(llama, config, zero_init=True)), config, lr=1e-2)
        train(engine, 2)
        return engine

    def plain_loss(model):
        tokens = next(batches(1, dist.get_rank(), seed=9))
        with torch.no_grad():
            return float(model(input_ids=tokens, labels=tokens).loss)

    engine = an_engine()
    before, numbers = codes(engine.module), decoded(engine.module)
    with gathered(engine.module):
        deltas = {n: layer.get_delta_weight("default") for n, layer in adapted_layers(engine.module).items()}
        merged = engine.module.merge_and_unload()
        if dist.get_rank() == 0:
            merged.save_pretrained(folder)
    log["codes stay"] = same(before, codes(merged))
    dist.barrier()
    saved = AutoModelForCausalLM.from_pretrained(folder)
    log["adapters left"] = [n for n, _ in merged.named_modules() if "lora" in n]
    log["saved"] = all(
        torch.allclose(saved.get_parameter(n), numbers[n] + deltas.get(n, 0), rtol=1e-6, atol=1e-7) for n in numbers
    )

    engine = an_engine()
    with gathered(engine.module, modifier_rank=0):
        merged = engine.module.merge_and_unload()
    for name in deltas:
        weight = saved.get_parameter(name)
        weight.data = rounded(weight.data, fields)
    log["goes on evaluating"] = plain_loss(saved), evaluate(engine)
    kept = codes(merged)

    def copies():
        return sum(stored_weight(p).before_merge is not None for p in merged.parameters() if stored_weight(p))

    log["copies left"] = copies()
    gc.collect()  # PEFT's layers are gone by now
    with gathered(merged, modifier_rank=0):
        pass
    log["nothing comes back"] = same(kept, codes(merged)) and evaluate(engine) == log["goes on evaluating"][1]

    engine = an_engine()
    with gathered(engine.module, modifier_rank=0):
        engine.module.merge_adapter()
    kept = codes(engine.module)
    with gathered(engine.module, modifier_rank=0):
        merged = engine.module.merge_and_unload()
    log["merged before"] = same(kept, codes(merged)), copies(), evaluate(engine) == log["goes on evaluating"][1]
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


# -- bad input -------------------------------------------------------------------------------------------------------


def bad_input(fields, overrides=None, **more):
    """What is said, and that nothing is lost once it is put right."""
    switch(True)
    config = config_of(fields, overrides=overrides, **more)
    engine = make_engine(with_adapters(build(llama, config, zero_init=True)), config, lr=1e-2)
    model = engine.module
    train(engine, 1)
    before, loss, log = codes(model), evaluate(engine), {}
    key = model.get_base_model().model.layers[1].self_attn.k_proj

    def double():
        with torch.no_grad():
            key.weight.mul_(2)

    def double_in_context():
        with gathered(model):
            double()

    def as_before():
        return same(before, codes(model)), evaluate(engine) == loss

    key.weight.requires_grad_(True)
    log["trained"] = attempt(lambda: train(engine, 1)), attempt(lambda: evaluate(engine))
    key.weight.requires_grad_(False)
    log["frozen again"] = as_before()

    double()
    log["written"] = (attempt(lambda: evaluate(engine)),)
    log["written once"] = as_before()
    log["written in a context"] = (attempt(double_in_context),)
    log["context over"] = as_before()

    hook = key.register_forward_hook(lambda *_: double())
    # Where a unit stays gathered until its next use, it is that use that finds what was written.
    log["written while it runs"] = (attempt(lambda: [evaluate(engine) for _ in range(2)]),)
    hook.remove()
    log["hook removed"] = as_before()

    with gathered(model, modifier_rank=0):
        pass
    log["nothing written"] = as_before()
    doubled = decoded(model)["model.layers.1.self_attn.k_proj.weight"] * 2
    with gathered(model, modifier_rank=0), torch.no_grad():
        key.weight.mul_(2) if dist.get_rank() == 0 else key.weight.zero_()  # what rank 0 wrote counts
    log["one written"] = [n for n, code in codes(model).items() if not torch.equal(code, before[n])]
    log["requantized"] = torch.equal(decoded(model)[log["one written"][0]], rounded(doubled, fields))
    partly = decoded(model)[log["one written"][0]]
    partly[:8] = 0.5
    with gathered(model, modifier_rank=0), torch.no_grad():
        key.weight[:8] = 0.5
    log["a part written"] = torch.equal(decoded(model)[log["one written"][0]], rounded(partly, fields))
    log["goes on"] = len(train(engine, 1))
    return log


def merges_that_do_not_reach_the_codes(fields, overrides=None):
    """Merging on one rank only; merging and unmerging in contexts without modifier_rank; and putting it right."""
    switch(True)
    config = config_of(fields, overrides=overrides)
    engine = make_engine(with_adapters(build(llama, config, zero_init=True)), config, lr=1e-2)
    model, log = engine.module, {}
    before, loss = codes(model), evaluate(engine)

    def as_before():
        return same(before, codes(model)), evaluate(engine) == loss

    with gathered(model):
        model.merge_adapter()
    log["merged for nothing"] = attempt(lambda: evaluate(engine))
    with gathered(model):
        model.unmerge_adapter()
    log["unmerged in a context like it"] = as_before()

    with gathered(model, modifier_rank=0):
        model.merge_adapter()
    with gathered(model):
        model.unmerge_adapter()
    log["unmerged for nothing"] = attempt(lambda: evaluate(engine))
    with gathered(model, modifier_rank=0):
        pass
    log["taken out"] = as_before()

    def merge_on_one_rank():
        with gathered(model, modifier_rank=0):
            if dist.get_rank() == 0:
                model.merge_adapter()

    log["merged on one rank"] = attempt(merge_on_one_rank)
    if dist.get_rank() == 0:
        for layer in adapted_layers(model).values():
            layer.merged_adapters.clear()
    log["nothing merged"] = as_before()
    return log


def refused_engines(fields, other):
    """Engines that do not go with what a model was made with, and one that does."""
    switch(True)
    config, log = config_of(fields), {}
    model = build(llama, config, zero_init=True)
    before = codes(model)
    log["trained"] = attempt(lambda: make_engine(model, config))
    with_adapters(model)
    log["other format"] = attempt(lambda: make_engine(model, config_of(other)))
    log["no format"] = attempt(lambda: make_engine(model, config_of({"format": "none"})))
    log["stock"] = attempt(lambda: make_engine(model, ds_config()))
    named = {**fields, "modules": ["v_proj"]}
    log["trained by name"] = attempt(lambda: make_engine(llama(), config_of(named)))
    kept = same(before, codes(model))
    model = with_adapters(build(llama, config, zero_init=True))
    engine = make_engine(model, config, lr=0.0)
    losses, before = train(engine, 2), codes(model)
    engine.destroy()
    log["after all"] = kept, losses == train(make_engine(model, config, lr=0.0), 2), same(before, codes(model))

    trained = build(llama, config_of({**fields, "modules": "frozen"}), zero_init=True)
    engine = make_engine(trained, config_of({**fields, "modules": "frozen"}))
    log["stored of a trained model"] = len(codes(trained)), len(train(engine, 1))
    trained = build(llama, config_of({**fields, "skip_modules": ["*"]}), zero_init=True)
    log["stored of a skipped model"] = len(codes(trained))
    log["stored for evaluation"] = len(codes(make_engine(llama(), config, optimizer=None).module))
    return log


# -- Trainer and Accelerate ------------------------------------------------------------------------------------------


class _Tokens(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = [row for tokens in batches(32, rank=0, batch=4) for row in tokens]

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
        max_steps=12,
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
    trainer = Trainer(model=model, args=arguments, train_dataset=_Tokens(), eval_dataset=_Tokens())
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
    for _, batch in zip(range(12), loader):
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


# -- models and settings ---------------------------------------------------------------------------------------------


class Body(torch.nn.Module):
    """Layers whose rows and parts do not fill blocks, with biases."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(37, 53), torch.nn.Linear(53, 5), torch.nn.Linear(5, 3)])

    def forward(self, hidden):
        for layer in self.layers:
            hidden = torch.nn.functional.silu(layer(hidden))
        return hidden


class Odd(torch.nn.Module):
    """A model that initializes what is stored by then: empty tensors under zero.Init, which stock does not mind."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.embedding, self.body, self.head = torch.nn.Embedding(256, 37), Body(), torch.nn.Linear(3, 4)
        torch.nn.init.normal_(self.body.layers[0].weight)
        self.apply(lambda module: torch.nn.init.normal_(module.weight) if hasattr(module, "weight") else None)
        for param in self.body.parameters():
            param.requires_grad_(False)

    def forward(self, input_ids, labels):
        logits = self.head(self.body(self.embedding(input_ids)))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten() % 4)
        return type("Output", (), {"loss": loss})()


def gpt2(tie=True):
    """A GPT-2, whose linear layers are Conv1D with biases, and whose head is its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, use_cache=False, tie_word_embeddings=tie))


MAKERS = {"llama": llama, "odd": Odd, "gpt2": gpt2, "tied": lambda: llama(tie=True, attention_bias=True)}


def against_rounded(model="llama", fields=None, zero_init=False, checkpointing=None, overrides=None, **more):
    """Training over stored weights, and over weights rounded beforehand that rest as numbers; bit for bit."""
    switch(True)
    ranks_per_node = 1
    runs, stored = {}, None
    state = MAKERS[model]().state_dict()
    for kind in ("stored", "rounded"):
        config = config_of(
            fields if kind == "stored" else {"format": "none"}, "fp32", ranks_per_node, overrides, **more
        )
        made = load_into(build(MAKERS[model], config, zero_init and kind == "stored"), state)
        if kind == "rounded":
            for name, param in made.named_parameters():
                if name in stored:
                    param.data = rounded(param.data, fields)
        if model != "odd":
            targets = ["c_attn", "c_fc"] if model == "gpt2" else TARGETS
            made = with_adapters(made, target_modules=targets, fan_in_fan_out=model == "gpt2")
        if checkpointing is not None:
            made.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
            made.enable_input_require_grads()
        engine = make_engine(made, config, lr=1e-2)
        stored = set(codes(made)) if kind == "stored" else stored
        before = codes(made)
        runs[kind] = train(engine, 3), full_fp32_weights(made), same(before, codes(made))
    (losses, trained, unchanged), (wanted, wanted_trained, _) = runs["stored"], runs["rounded"]
    return {
        "equal": losses == wanted and same(trained, wanted_trained) and unchanged,
        "losses": (losses, wanted),
        "stored": sorted(stored),
    }


def all_against_rounded(cases):
    return {name: against_rounded(**case) for name, case in cases.items()}
