"""Loading policies and scoring models, LoRA adapters and switching between them, saving.

A stage's folder holds a whole model or a LoRA adapter (adapter_config.json names the model that it belongs to), and the
tokenizer. The next stage loads either. With LoRA the models of RLHF share weights: policy and reference are adapters
over one model, critic and reward over another, so that four models take the memory of two.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from basics import training_dtype
from deepspeed.runtime.zero import GatheredParameters
from peft import (
    LoraConfig,
    PeftModel,
    TaskType,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

import zeropp_fp8
from zeropp_fp8.config import resolve

POLICY, REFERENCE, CRITIC, REWARD = "policy", "reference", "critic", "reward"  # names of adapters
DEFAULT_RANK = 16
PEFT_MODULES = (BaseTunerLayer, AuxiliaryTrainingWrapper)


# --- where a stage starts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """A whole model, and the folder of an adapter on it or None."""

    base: str
    adapter: str | None = None

    @property
    def scores(self) -> bool:
        """Whether the adapter is a scoring model's."""
        return self.adapter is not None and LoraConfig.from_pretrained(self.adapter).task_type == TaskType.SEQ_CLS


def find_start(name: str) -> Start:
    """Return what a folder of an earlier stage, a model's folder, or a name on the hub stands for.

    Raises:
        FileNotFoundError: a folder without a model, or an adapter whose model is gone.
    """
    folder = Path(name)
    if not folder.is_dir():
        return Start(name)
    if (folder / "adapter_config.json").is_file():
        base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        if Path(base).is_absolute() and not Path(base).is_dir():
            raise FileNotFoundError(
                f'{name} holds an adapter for {base}, which is not there; set "base_model_name_or_path" in its '
                "adapter_config.json"
            )
        return Start(base, name)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{name}: no model there (neither config.json nor adapter_config.json)")
    return Start(name)


def load_tokenizer(name: str):
    """The tokenizer of a stage's folder. One without a padding token pads with its end token; masks tell them apart.

    Raises:
        ValueError: it has no end token, so that no response could end.
    """
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f'{name}: its tokenizer has no end token, so no response could end; set "eos_token" in its '
            "tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def lora_config(arguments, ds_config: dict, start: Start) -> LoraConfig | None:
    """How adapters are made, or None where all weights are trained.

    Without --lora_rank: adapters where the ds_config stores frozen weights (recipe qlora), else none. An adapter that
    the stage starts from is trained on with its own rank and settings.

    Raises:
        ValueError: --lora_rank contradicts the ds_config.
    """
    plugin = resolve(ds_config)
    stores = plugin is not None and plugin.frozen.format != "none"
    rank = (DEFAULT_RANK if stores else 0) if arguments.lora_rank is None else arguments.lora_rank
    if rank == 0:
        if stores:
            raise ValueError(
                f"--lora_rank 0 trains all weights, but the ds_config stores frozen ones as {plugin.frozen.format} "
                'codes; leave --lora_rank out, or set "zeropp_fp8.frozen.format" to "none"'
            )
        return None
    if start.adapter is not None:
        return LoraConfig.from_pretrained(start.adapter)
    alpha = 2 * rank if arguments.lora_alpha is None else arguments.lora_alpha
    return LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=arguments.lora_dropout, target_modules="all-linear")


# --- loading -----------------------------------------------------------------------------------------------------


@contextmanager
def partitioned(ds_config: dict) -> Iterator[None]:
    """from_pretrained makes models under zero.Init in here: weights stream into shards, frozen ones into codes."""
    kept = HfDeepSpeedConfig(copy.deepcopy(ds_config))  # transformers holds it weakly
    try:
        yield
    finally:
        del kept


def load_policy(start: Start, ds_config: dict, lora: LoraConfig | None, reference: bool = False) -> nn.Module:
    """A causal language model to train: all of it, or with LoRA its adapter "policy".

    Args:
        lora: see `lora_config`. None: an adapter that `start` has is merged.
        reference: add what `start` has as a second adapter, "reference", which stays as it is. Where `start` has no
            adapter the reference is the model with none, and nothing is added.
    """
    with partitioned(ds_config):
        model = AutoModelForCausalLM.from_pretrained(start.base, dtype=training_dtype(ds_config))
        model.config.use_cache = False
        if lora is None:
            return model if start.adapter is None else _merged(model, start.adapter, TaskType.CAUSAL_LM)
        lora = _for_task(lora, TaskType.CAUSAL_LM)
        model = _with_adapter(model, POLICY, lora, start.adapter)
        if reference and start.adapter is not None:
            model = _with_adapter(model, REFERENCE, lora, start.adapter)
    _train_only(model, POLICY)
    return model


class TokenScores(nn.Module):
    """A scoring model: a score for every token, of the text up to it. The score of a text is that of its last token.

    Args:
        model: a transformers model for sequence classification with one label, whose head is `score`; with or without
            LoRA adapters.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not isinstance(getattr(transformers_model(model), "score", None), nn.Module):
            raise ValueError(
                f"{type(transformers_model(model)).__name__} has no head `score`; take another model for scoring"
            )
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """int64 [B, L], int64 [B, L] -> fp32 [B, L]."""
        classifier = transformers_model(self.model)
        hidden = classifier.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return classifier.score(hidden.last_hidden_state).squeeze(-1).float()


def load_scorer(
    start: Start,
    ds_config: dict,
    lora: LoraConfig | None,
    trained: str | None = None,
    frozen: str | None = None,
    new_head: str = "random",
) -> TokenScores:
    """A scoring model from a causal language model or from an earlier scoring model.

    Args:
        lora: see `lora_config`. None: an adapter that `start` has is merged.
        trained: with LoRA the name of the adapter to train, head included.
        frozen: with LoRA the name of a second adapter that stays what `start` is.
        new_head: "random" or "zero": where `start` has no head, what the new one begins with. (With "zero" a critic
            begins by saying 0 everywhere.)
    """
    with partitioned(ds_config):
        model, report = AutoModelForSequenceClassification.from_pretrained(
            start.base, num_labels=1, dtype=training_dtype(ds_config), output_loading_info=True
        )
        model.config.use_cache = False
        has_head = start.scores or not any(key.startswith("score.") for key in report["missing_keys"])
        if not has_head and new_head == "zero":
            with GatheredParameters(list(model.score.parameters()), modifier_rank=0), torch.no_grad():
                for param in model.score.parameters():
                    param.zero_()
        if lora is None:
            return TokenScores(model if start.adapter is None else _merged(model, start.adapter, TaskType.SEQ_CLS))
        lora = _for_task(lora, TaskType.SEQ_CLS)
        model = _with_adapter(model, trained, lora, start.adapter)
        if frozen is not None:
            model = _with_adapter(model, frozen, lora, start.adapter)
    _train_only(model, trained)
    return TokenScores(model)


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model in which PEFT has put its layers."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _for_task(lora: LoraConfig, task: TaskType) -> LoraConfig:
    """The same adapter for another task: a scoring model's is a language model's and a head."""
    lora = copy.deepcopy(lora)
    lora.task_type, lora.inference_mode = task, False
    lora.modules_to_save = ["score"] if task == TaskType.SEQ_CLS else None
    return lora


def _with_adapter(model: nn.Module, name: str, lora: LoraConfig, folder: str | None) -> PeftModel:
    """Add an adapter, with the weights in `folder` or new ones that change nothing yet. The first one is active."""
    if isinstance(model, PeftModel):
        model.add_adapter(name, copy.deepcopy(lora), autocast_adapter_dtype=False)
    else:
        model = get_peft_model(model, copy.deepcopy(lora), adapter_name=name, autocast_adapter_dtype=False)
    if folder is not None:
        _load_adapter(model, name, folder)
    return model


def _train_only(model: nn.Module, adapter: str) -> None:
    trained = _parameters_of(model, adapter)
    for name, param in model.named_parameters():
        param.requires_grad_(name in trained)


def _load_adapter(model: PeftModel, name: str, folder: str) -> None:
    """Write the weights in `folder` into an adapter; a head that the folder does not have stays as it is.

    Raises:
        ValueError: they are not this model's.
    """
    weights = load_peft_weights(folder, device="cpu")
    for path, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            for key, param in module.modules_to_save[name].named_parameters():
                weights.setdefault(f"{path}.{key}", param.detach())
    result = set_peft_model_state_dict(model, weights, adapter_name=name)
    missing = [key for key in result.missing_keys if f".{name}." in key and "lora_" in key]
    if missing or result.unexpected_keys:
        wrong, kind = (missing or result.unexpected_keys)[0], type(transformers_model(model)).__name__
        raise ValueError(f"the adapter in {folder} does not fit this {kind}: see {wrong}")


def _parameters_of(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if f".{adapter}." in name}


def _merged(model: PreTrainedModel, folder: str, task: TaskType) -> PreTrainedModel:
    """The model with an adapter merged in and no trace of PEFT; one layer is gathered at a time."""
    model = _with_adapter(model, "merged", _for_task(LoraConfig.from_pretrained(folder), task), folder)
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            with GatheredParameters(list(layer.parameters()), modifier_rank=0):
                layer.merge()
    return model.base_model.unload().requires_grad_(True)


# --- adapters ----------------------------------------------------------------------------------------------------


class Adapters:
    """The PEFT layers of a model as they are now; looking for them takes as long as a fifth of a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, PEFT_MODULES)]
        self._names = {adapter for layer in self._layers for adapter in layer._get_available_adapters()}

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """Compute with one adapter, or with none, whichever is trained: no requires_grad changes, unlike PEFT's own.

        A model without PEFT layers stays as it is.

        Raises:
            ValueError: the model has adapters, but not this one.
        """
        layers = self._layers
        if layers and name is not None and name not in self._names:
            raise ValueError(f"the model has no adapter {name!r}; it has {', '.join(sorted(self._names))}")
        before = [(layer.__dict__, layer._active_adapter, layer._disable_adapters) for layer in layers]
        active = [name]
        for own, used, _ in before:
            own["_disable_adapters"] = name is None  # nn.Module's __setattr__ looks for parameters first
            own["_active_adapter"] = used if name is None else active
        try:
            yield
        finally:
            for own, used, disabled in before:
                own["_active_adapter"], own["_disable_adapters"] = used, disabled


def without_dropout(model: nn.Module) -> None:
    """PPO compares probabilities of the same tokens before and after a step: nothing else may change them."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):  # probabilities that attention layers hand to a function
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def recompute_activations(model: nn.Module) -> None:
    """Activation checkpointing; gradients must flow into blocks whose own weights are frozen."""
    bare = transformers_model(model.model if isinstance(model, TokenScores) else model)
    bare.gradient_checkpointing_enable({"use_reentrant": False})
    bare.enable_input_require_grads()


# --- handing over, saving ----------------------------------------------------------------------------------------


@torch.no_grad()
def gathered_weights(model: nn.Module, adapter: str | None) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of the transformers model, with an adapter merged in; one module is gathered at a time.

    Names are those without PEFT. A weight is good until the next one is asked for. On every rank.
    """
    seen: set[int] = set()
    with Adapters(model).using(adapter):
        for name, module in _modules_with_weights(transformers_model(model)):
            is_peft = isinstance(module, PEFT_MODULES)
            params = list(module.parameters(recurse=is_peft))
            with GatheredParameters(params, modifier_rank=None), _merged_values(module) as merged:
                for key, param in merged.named_parameters(recurse=is_peft):
                    if id(param) not in seen:  # a tied one comes under its first name
                        seen.add(id(param))
                        yield f"{name}.{key}", param.data


def _modules_with_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the modules that have weights themselves; PEFT's count as one with what they hold."""
    inside = "\0"  # no name begins like this
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        if isinstance(module, PEFT_MODULES):
            inside = f"{name}."
            yield name, module
        elif next(module.parameters(recurse=False), None) is not None:
            yield name, module


@contextmanager
def _merged_values(module: nn.Module) -> Iterator[nn.Module]:
    """The module that `module` stands for, with active adapters merged into copies of its gathered weights."""
    if isinstance(module, AuxiliaryTrainingWrapper):
        yield module.original_module if module.disable_adapters else module.modules_to_save[module.active_adapters[0]]
    elif not isinstance(module, BaseTunerLayer):
        yield module
    elif module.disable_adapters:
        yield module.get_base_layer()
    else:
        base = module.get_base_layer()
        values = {param: param.data for param in base.parameters()}
        for param in values:
            param.data = param.data.clone()  # with one rank the gathered values are the shard itself
        try:
            module.merge()
            yield base
        finally:
            module.merged_adapters.clear()
            for param, data in values.items():
                param.data = data


def save_model(model: nn.Module, folder: str | Path, tokenizer, adapter: str | None = None) -> None:
    """Write what the next stage starts from: with LoRA the adapter, else the model in its own dtype. On every rank."""
    model, folder = model.model if isinstance(model, TokenScores) else model, Path(folder)
    if isinstance(model, PeftModel):
        save_adapter(model, folder, adapter)
    else:
        zeropp_fp8.save_merged_16bit(model, folder)
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(folder)
    dist.barrier()


def save_adapter(model: PeftModel, folder: Path, adapter: str) -> None:
    """Write one adapter in PEFT's format, as if it were the only one; only its own weights are gathered."""
    with GatheredParameters(list(_parameters_of(model, adapter).values()), modifier_rank=None):
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            weights = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
            weights = {name: weight.detach().cpu().contiguous().clone() for name, weight in weights.items()}
            save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            config = copy.deepcopy(model.peft_config[adapter])
            config.inference_mode = True
            base = Path(config.base_model_name_or_path)
            config.base_model_name_or_path = str(base.resolve()) if base.is_dir() else str(base)
            config.save_pretrained(folder)
