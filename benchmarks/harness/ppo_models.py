"""The four models of PPO as random Llamas in ZeRO-3 engines, in the roles of examples/rlhf, and their memory.

Imported by ranks that have joined: DeepSpeed chooses its accelerator when it is imported.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import deepspeed
import torch
from common.arguments import PPOArguments
from common.batch import Tokens
from common.engines import frozen_ds_config, make_frozen_engine
from common.models import CRITIC, POLICY, REFERENCE, REWARD, TokenScores, without_dropout
from common.roles import Role, in_parts, scores_of
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from ppo import Experience, make_experience, train_on
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

import zeropp_fp8
from benchmarks.harness.hf_llama import llama_config
from benchmarks.harness.lora import LORA_RANK, adamw
from benchmarks.harness.measuring import random_tokens, stored_bytes
from benchmarks.harness.sizes import Size
from zeropp_fp8.zero.as_deepspeed import GRAD_PARTITIONS

LR = 1e-5


# -- making ----------------------------------------------------------------------------------------------------------


@dataclass
class FourModels:
    """PPO's models.

    Attributes:
        parameters: of all four, adapters not counted: what they would have if each had its own weights.
    """

    actor: Role
    reference: Role
    critic: Role
    reward: Role
    parameters: int
    arguments: PPOArguments = field(
        default_factory=lambda: PPOArguments(model="", out="", deepspeed_config="", data=[])
    )

    @property
    def engines(self) -> list:
        """Each once: roles may share one."""
        return list(dict.fromkeys(role.engine for role in (self.actor, self.reference, self.critic, self.reward)))

    @property
    def trained_parameters(self) -> int:
        """Of all ranks together."""
        models = (self.actor.engine.module, self.critic.engine.module)
        return sum(p.ds_numel for model in models for p in model.parameters() if p.requires_grad)

    def experience(self, rollout: Tokens) -> Experience:
        """Return what the four make of a rollout, scored by the reward model."""
        scores = in_parts(lambda part: scores_of(self.reward, part), rollout, len(rollout))
        coefficient = self.arguments.kl_coefficient
        roles = self.actor, self.reference, self.critic
        return make_experience(self.arguments, *roles, rollout, scores, coefficient)[0]

    def train(self, experience: Experience) -> dict[str, Tensor]:
        """A minibatch: a step of the actor and one of the critic; the losses, fp32 []."""
        figures = train_on(self.arguments, self.actor, self.critic, experience, iteration=0)[-1]
        return {name: figures[name].detach() for name in ("policy_loss", "value_loss")}

    def step(self, rollout: Tokens) -> Tensor:
        """Both phases, with all of a rollout as one micro-batch; the critic's loss, fp32 []."""
        for engine in self.engines:
            engine.set_train_micro_batch_size(len(rollout))
        return self.train(self.experience(rollout))["value_loss"]

    def close(self) -> None:
        """Free what can be freed."""
        for engine in self.engines:
            engine.destroy()
        zeropp_fp8.disable()


def random_rollouts(vocabulary: int, batch: int, prompt: int, tokens: int, device: torch.device) -> Iterator[Tokens]:
    """Prompts and responses of random tokens, none padded; the same in every run, different ones on every rank."""
    length = prompt + tokens
    chosen = (torch.arange(1, length, device=device) >= prompt).expand(batch, -1)
    for ids in random_tokens(vocabulary, batch, length, device):
        yield Tokens(ids, torch.ones_like(ids), chosen)


def make_models(
    config: dict, size: Size, device: torch.device, *, lora: bool, shared: bool, leaf: bool, seed: int = 0
) -> FourModels:
    """Random models, sharded from the beginning.

    Args:
        config: ds_config of what is trained.
        lora: adapters are trained; else all weights.
        shared: policy and reference are adapters over one model, critic and reward model over another.
        leaf: make every decoder layer a z3 leaf module.
    """
    zeropp_fp8.enable() if "zeropp_fp8" in config else zeropp_fp8.disable()
    torch.manual_seed(seed)
    roles, parameters = [], 0
    for kind, names in ((LlamaForCausalLM, (POLICY, REFERENCE)), (LlamaForSequenceClassification, (CRITIC, REWARD))):
        model, numel = _random(kind, size, config)
        if lora:
            model = _with_adapters(model, names if shared else names[:1])
        roles.append(Role(_trained_engine(_finished(model, leaf), config, device), names[0] if lora else None))
        if shared:
            roles.append(Role(roles[-1].engine, names[1]))
        else:
            frozen = frozen_ds_config(config, None)
            copy_, _ = _random(kind, size, frozen)
            roles.append(Role(make_frozen_engine(_finished(copy_, leaf), frozen)))
        parameters += 2 * numel
    return FourModels(*roles, parameters)


def _random(kind: type[nn.Module], size: Size, config: dict) -> tuple[nn.Module, int]:
    """A model with torch's own random weights, of which no rank holds more than a layer; and its parameters."""
    settings = llama_config(size)
    settings.num_labels = 1
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = kind(settings)
    return model, sum(p.ds_numel for p in model.parameters())


def _with_adapters(model: nn.Module, names: tuple[str, ...]) -> PeftModel:
    """LoRA adapters on all linear layers of the blocks, with a scoring model its head as well; the first is trained."""
    scores = isinstance(model, LlamaForSequenceClassification)
    # Stock's leaf modules drop the first layer's weights before its backward where no input requires gradients.
    model.enable_input_require_grads()
    lora = LoraConfig(
        r=LORA_RANK,
        lora_alpha=2 * LORA_RANK,
        target_modules="all-linear",
        task_type=TaskType.SEQ_CLS if scores else TaskType.CAUSAL_LM,
        modules_to_save=["score"] if scores else None,
    )
    model = get_peft_model(model, copy.deepcopy(lora), adapter_name=names[0], autocast_adapter_dtype=False)
    for name in names[1:]:
        model.add_adapter(name, copy.deepcopy(lora), autocast_adapter_dtype=False)
    for name, param in model.named_parameters():
        param.requires_grad_(f".{names[0]}." in name)
    return model


def _finished(model: nn.Module, leaf: bool) -> nn.Module:
    """As engines take it."""
    without_dropout(model)
    if leaf:
        deepspeed.utils.set_z3_leaf_modules(model, ["LlamaDecoderLayer"])
    bare = model.get_base_model() if isinstance(model, PeftModel) else model
    return TokenScores(model) if isinstance(bare, LlamaForSequenceClassification) else model


def _trained_engine(model: nn.Module, config: dict, device: torch.device):
    """Like common/engines.py's, with torch's fused AdamW, stock's too: the plugin takes that one by itself."""
    engine = deepspeed.initialize(model=model, optimizer=adamw(model, device, lr=LR), config=copy.deepcopy(config))[0]
    engine.train()
    return engine


# -- memory ----------------------------------------------------------------------------------------------------------


def bytes_by_kind(models: FourModels) -> dict[str, int]:
    """Bytes that this rank keeps: "weights", "states" and "secondary" as rlhf_step.py says.

    Codes that this rank stores in a copy are weights.
    """
    engines = models.engines
    shards = [getattr(p, "ds_tensor", p) for engine in engines for p in engine.module.parameters()]
    copies = _storages(tensor for engine in engines for tensor in _secondary_shards(engine))
    in_copies = sum(shard.nbytes for shard in shards if shard.untyped_storage().data_ptr() in copies)
    apart = sum(size for place, size in _storages(shards).items() if place not in copies)
    return {
        "weights": apart + in_copies,
        "states": sum(_state_bytes(engine.optimizer) for engine in (models.actor.engine, models.critic.engine)),
        "secondary": sum(copies.values()) - in_copies,
    }


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage by its address: several shards may be cut out of one."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _state_bytes(optimizer: DeepSpeedZeroOptimizer_Stage3) -> int:
    """Of master weights, reduced gradients and moments, in the optimizer's own tensors or the plugin's stores."""
    kept = list(optimizer.fp32_partitioned_groups_flat)
    kept += [x for state in optimizer.optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
    if getattr(getattr(optimizer, "gradients", None), "store", None) is None:
        kept += getattr(optimizer, GRAD_PARTITIONS).values()
    return sum(_storages(kept).values()) + stored_bytes(optimizer)


def _secondary_shards(engine) -> Iterable[Tensor]:
    """Of an engine with the plugin; those of older weights too, whose buffers stay."""
    session = getattr(engine, "zeropp_fp8_session", None)
    if session is None or session.secondary_ranks is None:
        return []
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    return [unit.secondary for unit in offload.gatherer.units if unit.secondary is not None]
