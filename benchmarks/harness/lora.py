"""The LoRA fine-tunings that the benchmarks of frozen weights compare, all of transformers' Llama in bf16.

stock-lora      stock DeepSpeed's ZeRO-3, decoder layers as z3 leaf modules
lossless-lora   the same through this project
zeropp-lora     weights are sent as INT8 and each node keeps what it received; they are stored in 16 bits
int8, int4      frozen weights are stored as codes, blocks of 64; the rest as zeropp-lora
int4-dq         scales in 8 bits (double quantization)
nf4, nf4-dq     NF4; nf4-dq is the recipe `qlora`
nf4-dq-rank     qlora, and every rank keeps all codes
bnb             bitsandbytes' QLoRA without DeepSpeed, on one device: Linear4bit, NF4, double quantization

The model is made under zero.Init, so that codes replace weights layer by layer. Adapters are on all linear layers of
the blocks (of mixtures on those of attention: 128 experts would have 1 B parameters of rank 16); embedding, lm_head and
norms stay in 16 bits, with bnb too.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.environment import forget_memory
from benchmarks.harness.hf_llama import llama_config, sharded_model
from benchmarks.harness.measuring import Meter
from benchmarks.harness.sizes import Size
from benchmarks.harness.zero3 import CLIP, ds_config
from zeropp_fp8 import sharded
from zeropp_fp8.compute.experts import packed_experts

STOCK, ZEROPP, QLORA, BNB = "stock-lora", "zeropp-lora", "nf4-dq", "bnb"


def stored(name: str, **fields) -> dict:
    """The section of a run whose frozen weights rest as codes of format `name`."""
    return {"recipe": "zeropp", "frozen": {"format": name, "block_size": 64, **fields}}


SECTIONS: dict[str, dict[str, Any] | None] = {
    STOCK: None,
    "lossless-lora": {"recipe": "lossless"},
    ZEROPP: {"recipe": "zeropp"},
    "int8": stored("int8"),
    "int4": stored("int4"),
    "int4-dq": stored("int4", double_quantize=True),
    "nf4": stored("nf4"),
    QLORA: {"recipe": "qlora"},
    "nf4-dq-rank": {"recipe": "qlora", "secondary": {"scope": "rank"}},
    BNB: None,
}
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
LAYERS = (*ATTENTION, *MLP)  # the linear layers of a block
LORA_RANK = 16


def without_bnb_where_it_cannot_run(runs: list[str], ranks: int) -> list[str]:
    """The runs; what bnb lacks is printed."""
    reason = None
    if ranks > 1:
        reason = f"it is for one GPU, and there are {ranks} ranks"
    elif importlib.util.find_spec("bitsandbytes") is None:
        reason = "bitsandbytes is not installed"
    if BNB in runs and reason is not None:
        print(f"{BNB} is left out: {reason}", flush=True)
        return [run for run in runs if run != BNB]
    return runs


# -- models ----------------------------------------------------------------------------------------------------------


def bnb_llama(size: Size, device: torch.device) -> nn.Module:
    """The same with the linear layers of its blocks as bitsandbytes' Linear4bit, made layer by layer."""
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = llama_config(size)
    config.num_hidden_layers = 0
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(config)
        config.num_hidden_layers = size.layers
        for index in range(size.layers):
            layer = LlamaDecoderLayer(config, index)
            for part, names in ((layer.self_attn, ATTENTION), (layer.mlp, MLP)):
                for name in names:
                    setattr(part, name, _linear_4bit(getattr(part, name), device))
            model.model.layers.append(layer)
    torch.set_default_dtype(before)
    model.is_loaded_in_4bit = True  # what PEFT looks at
    return model


def _linear_4bit(linear: nn.Linear, device: torch.device) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    options = {"compress_statistics": True, "quant_type": "nf4"}
    with torch.device("meta"):
        made = Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, **options)
    made.weight = Params4bit(linear.weight.detach(), requires_grad=False, module=made, **options)
    return made.to(device)  # quantizes


def frozen_weights(model: nn.Module) -> dict[int, int]:
    """{id: elements} of weights of the blocks' linear layers, and of packed experts, before there are adapters."""
    layers = [module for name, module in model.named_modules() if name.rpartition(".")[2] in LAYERS]
    experts = [weight for module in model.modules() for weight in packed_experts(module)]
    found = {id(layer.weight): layer.in_features * layer.out_features for layer in layers}
    return found | {id(weight): math.prod(sharded.shape(weight)) for weight in experts}


def other_bytes(model: nn.Module) -> int:
    """Bytes that a rank has of everything but these weights."""
    frozen = frozen_weights(model)
    params = [getattr(p, "ds_tensor", p) for p in model.parameters() if id(p) not in frozen]
    return sum(tensor.nbytes for tensor in (*params, *model.buffers()))


def with_adapters(model: nn.Module, seed: int, autocast: bool = False, alpha: int = 2 * LORA_RANK) -> nn.Module:
    """LoRA (PEFT) on all linear layers of the blocks, of mixtures on those of attention; everything else is frozen.

    `autocast`: adapters in fp32, as PEFT has them for who trains under autocast; else in the model's dtype.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    layers = ATTENTION if any(map(packed_experts, model.modules())) else LAYERS
    config = LoraConfig(r=LORA_RANK, lora_alpha=alpha, target_modules=list(layers), task_type="CAUSAL_LM")
    return get_peft_model(model, config, autocast_adapter_dtype=autocast)


def adamw(model: nn.Module, device: torch.device, **options) -> torch.optim.Optimizer:
    """torch's AdamW over what is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, **{"lr": 1e-4, **options}, fused=device.type == "cuda")


# -- trainings -------------------------------------------------------------------------------------------------------


class Training:
    """Numbers of a fine-tuning while it is made.

    Attributes:
        parameters, frozen_parameters: of the base model; of its blocks' linear layers and packed experts.
        model_bytes: of this rank once the base model is made; making_peak: the most until then, None on a CPU.
        frozen_bytes: of these without what else is known to be there.
        engine_bytes: of this rank once all is made; engine_peak: the most until then, None on a CPU.
    """

    with_plugin = False

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.meter = device, Meter(device)
        self.engine_bytes, self.engine_peak = 0, None
        torch.manual_seed(seed)

    def _base_is_made(self, model: nn.Module, checkpointing: bool) -> None:
        self.making_peak, self.model_bytes = self.meter.peak(), self.meter.bytes()
        self.frozen_bytes = self.model_bytes - other_bytes(model)
        frozen = frozen_weights(model)
        self.frozen_parameters = sum(frozen.values())
        others = [p for p in model.parameters() if id(p) not in frozen]
        self.parameters = self.frozen_parameters + sum(getattr(p, "ds_numel", p.numel()) for p in others)
        # Stock's leaf modules drop the first layer's weights before its backward where no input requires gradients.
        model.enable_input_require_grads()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def sent(self) -> dict[str, float] | None:
        """Bytes that all ranks have sent in finished steps, {"inter", "intra"}; None without the plugin."""
        return None


class LoraRun(Training):
    """A LoRA fine-tuning in a ZeRO-3 engine.

    Args:
        section: the plugin's; None for stock DeepSpeed.
        make_model: makes the base model, from the ds_config.
        leaf: make every decoder layer a z3 leaf module.
        small, lean, bf16: see zero3.ds_config.
        optimizer: keywords of torch.optim.AdamW.
    """

    def __init__(
        self,
        section: dict | None,
        make_model: Callable[[dict], nn.Module],
        device: torch.device,
        *,
        micro_batch: int = 1,
        leaf: bool = False,
        small: bool = False,
        lean: bool = False,
        bf16: bool = True,
        checkpointing: bool = False,
        seed: int = 0,
        optimizer: dict | None = None,
    ) -> None:
        import deepspeed

        import zeropp_fp8

        zeropp_fp8.disable() if section is None else zeropp_fp8.enable()
        super().__init__(device, seed)
        self.with_plugin = section is not None
        config = ds_config(section, micro_batch, small=small, lean=lean, bf16=bf16)
        base = make_model(config)
        self._base_is_made(base, checkpointing)
        model = with_adapters(base, seed)
        if leaf:
            deepspeed.utils.set_z3_leaf_modules(model, [type(base.model.layers[0])])
        chosen = adamw(model, device, **(optimizer or {}))
        self.engine = deepspeed.initialize(model=model, optimizer=chosen, config=config)[0]
        del model, base
        self.engine_peak, self.engine_bytes = self.meter.peak(), self.meter.bytes()

    def loss(self, tokens: Tensor) -> Tensor:
        """fp32 [] of int64 tokens [micro-batch, length]."""
        return self.engine(input_ids=tokens, labels=tokens).loss

    def step(self, tokens: Tensor) -> Tensor:
        """One training step; its loss."""
        loss = self.loss(tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def sent(self) -> dict[str, float] | None:
        if not self.with_plugin:
            return None
        import zeropp_fp8

        report = zeropp_fp8.wire_report(self.engine, total=True)
        kinds = report["per_step"].values()
        return {link: sum(kind[link] for kind in kinds) * report["steps"] for link in ("inter", "intra")}

    def close(self) -> None:
        """Free what can be freed."""
        import zeropp_fp8

        self.engine.destroy()
        del self.engine
        zeropp_fp8.disable()
        forget_memory(self.device)


class BnbRun(Training):
    """bitsandbytes' QLoRA: no DeepSpeed, adapters in fp32 under bf16 autocast, as transformers' Trainer runs it."""

    def __init__(self, size: Size, device: torch.device, *, checkpointing: bool = False, seed: int = 0) -> None:
        super().__init__(device, seed)
        model = bnb_llama(size, device)
        self._base_is_made(model, checkpointing)
        self.model = with_adapters(model, seed, autocast=True).train()
        del model
        self.optimizer = adamw(self.model, device)
        self.engine_peak, self.engine_bytes = self.meter.peak(), self.meter.bytes()

    def step(self, tokens: Tensor) -> Tensor:
        """One training step on int64 tokens [micro-batch, length]; its loss."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def close(self) -> None:
        """Free what can be freed."""
        del self.model, self.optimizer
        forget_memory(self.device)


# -- what all questions about them do ---------------------------------------------------------------------------------


def made(run: str, args, size: Size, device: torch.device, lean: bool = False) -> LoraRun | BnbRun:
    """The training of a run."""
    if run == BNB:
        return BnbRun(size, device, checkpointing=args.checkpointing)
    return LoraRun(
        SECTIONS[run],
        lambda config: sharded_model(size, config),
        device,
        micro_batch=args.micro_batch,
        leaf=run == STOCK,
        small=size.small,
        lean=lean,
        checkpointing=args.checkpointing,
    )


def bytes_of(trainer: LoraRun | BnbRun) -> dict[str, int | None]:
    """Return what a rank had and has, the most over the ranks."""
    mine = {
        "frozen_bytes": trainer.frozen_bytes,
        "model_bytes": trainer.model_bytes,
        "making_peak_bytes": trainer.making_peak,
        "engine_bytes": trainer.engine_bytes,
        "engine_peak_bytes": trainer.engine_peak,
        "peak_bytes": trainer.meter.peak(),
        "rest_bytes": trainer.meter.bytes(),
    }
    gathered = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, mine)
    return {name: None if mine[name] is None else max(other[name] for other in gathered) for name in mine}


def unit_of(row: dict) -> tuple[str, int]:
    """The unit of bytes for a model of that size."""
    return ("GiB", 2**30) if row["parameters"] > 1e8 else ("MiB", 2**20)
