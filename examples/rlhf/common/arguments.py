"""The command lines: one dataclass a script, made of parts that several scripts share.

    arguments = parse(PPOArguments, __doc__)

Every field is an option, with "-" or "_" between words; its help is the field's. What can only be known together is
checked by the functions at the end, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

from options import Parser, finite, generator_seed, kept, new_folder, refusals, whole
from transformers import HfArgumentParser

from common.verifiers import reward_function
from zeropp_fp8.config import FROZEN_FORMATS, load_ds_config, resolve

STAGES = ("sft", "reward", "dpo", "ppo", "grpo")


def about(help: str, **more) -> dict:
    """The metadata of a field: its help text; `more` goes to argparse, "check" as the type of what is given."""
    return {"help": help, **more}


def option(default, help: str, **more):
    """A field with a default."""
    return field(default=default, metadata=about(help, **more))


def required(help: str, **more):
    """A field that must be given."""
    return field(metadata=about(help, **more))


@dataclass(kw_only=True)
class RunArguments:
    """Arguments of every stage."""

    model: str = required("where the stage starts: a folder that an earlier stage wrote, a model's folder or name")
    out: str = required("folder for the log, the checkpoints and the trained model", check=new_folder)
    deepspeed_config: str = required("path of the DeepSpeed JSON; recipes differ in nothing else")
    seed: int = option(0, "of new weights, the order of the rows and sampling", check=generator_seed)
    lr: float = option(1e-5, "learning rate after the warm-up", check=finite(least=0))
    weight_decay: float = option(0.0, "for matrices; vectors have none", check=finite(least=0))
    warmup: int = option(0, "optimizer steps over which the learning rate rises", check=whole(0))
    schedule: str = option("constant", "of the learning rate, after the warm-up", choices=["constant", "cosine"])
    gradient_checkpointing: bool = option(False, "compute activations again in backward instead of keeping them")
    log_every: int = option(1, "steps from one line of the log to the next", check=whole(1))
    save_every: int = option(0, "steps from one checkpoint to the next; 0: none", check=whole(0))
    keep_checkpoints: int = option(2, "how many checkpoints stay, the latest ones; all or -1: all of them", check=kept)
    resume: bool = option(False, "continue from the latest checkpoint in --out")
    local_rank: int = option(-1, "given by the deepspeed launcher")


@dataclass(kw_only=True)
class AdapterArguments:
    """LoRA, or all weights."""

    lora_rank: int | None = option(
        None,
        "rank of new LoRA adapters; 0: all weights are trained; not given: 16 where the ds_config stores frozen "
        "weights, else 0",
        check=whole(0),
    )
    lora_alpha: float | None = option(None, "LoRA's alpha; not given: twice the rank", check=finite(above=0))
    lora_dropout: float = option(
        0.0, "dropout before new adapters, in SFT and reward model", check=finite(least=0, below=1)
    )


@dataclass(kw_only=True)
class RowArguments:
    """Where rows come from, and what is done with bad ones."""

    data: list[str] = field(
        metadata=about("JSONL or parquet files, folders of them, or Hugging Face data sets, NAME[:CONFIG][@SPLIT]")
    )
    eval_data: list[str] = field(default_factory=list, metadata=about("held-out rows of the same kind"))
    eval_every: int = option(0, "steps from one evaluation to the next; 0: only at the end", check=whole(0))
    chat: bool = option(False, "put texts into the tokenizer's chat template, prompts as the user's turn")
    bad_rows: str = option("skip", "malformed rows: leave out, or stop at start", choices=["skip", "refuse"])


@dataclass(kw_only=True)
class SampleArguments:
    """Looking at what a policy says while it learns from rows."""

    sample_every: int = option(0, "steps from one look at generated texts to the next; 0: none", check=whole(0))
    sample_tokens: int = option(64, "the longest such text", check=whole(1))


@dataclass(kw_only=True)
class SFTArguments(RunArguments, AdapterArguments, RowArguments, SampleArguments):
    """Supervised fine-tuning."""

    steps: int = option(0, "optimizer steps; 0: --epochs", check=whole(0))
    epochs: float = option(1.0, "passes over the rows", check=finite(above=0))
    max_tokens: int = option(1024, "longer rows are left out", check=whole(1))


@dataclass(kw_only=True)
class RewardModelArguments(RunArguments, AdapterArguments, RowArguments):
    """Training a reward model on preferences."""

    steps: int = option(0, "optimizer steps; 0: --epochs", check=whole(0))
    epochs: float = option(1.0, "passes over the rows", check=finite(above=0))
    max_tokens: int = option(1024, "of prompt and response; longer rows are left out", check=whole(1))
    centering: float = option(
        0.0, "coefficient of the squared sum of a pair's scores, which keeps them around 0", check=finite(least=0)
    )


@dataclass(kw_only=True)
class DPOArguments(RunArguments, AdapterArguments, RowArguments, SampleArguments):
    """Direct preference optimization."""

    steps: int = option(0, "optimizer steps; 0: --epochs", check=whole(0))
    epochs: float = option(1.0, "passes over the rows", check=finite(above=0))
    max_tokens: int = option(1024, "of prompt and response; longer rows are left out", check=whole(1))
    loss: str = option("sigmoid", "of a pair; see dpo_loss in common/losses.py", choices=["sigmoid", "hinge", "ipo"])
    beta: float = option(
        0.1,
        "of the implicit rewards: the larger, the closer the policy stays to where it starts",
        check=finite(above=0),
    )
    label_smoothing: float = option(
        0.0, "chance that a row's preference is wrong, below 0.5; with loss sigmoid", check=finite(least=0, below=0.5)
    )
    reference_free: bool = option(False, "no reference: its log-ratios are 0")
    reference_cache: str | None = option(
        None, "folder for the reference's log-probabilities, which several runs may share; not given: --out"
    )


@dataclass(kw_only=True)
class RolloutArguments(RunArguments, AdapterArguments, RowArguments):
    """Arguments of PPO and GRPO: generating, and scoring what was generated."""

    iterations: int = option(
        100, "rollouts, each with the training on it; those before --resume included", check=whole(1)
    )
    rollout_batch: int = option(16, "responses that a rank generates in an iteration", check=whole(1))
    generation_batch: int = option(0, "of these, how many at a time; 0: all", check=whole(0))
    max_prompt_tokens: int = option(256, "longer prompts are left out", check=whole(1))
    max_new_tokens: int = option(256, "of a response", check=whole(1))
    temperature: float = option(1.0, "of sampling, and of the log-probabilities", check=finite(above=0))
    top_p: float = option(1.0, "nucleus of sampling", check=finite(above=0, most=1))
    top_k: int = option(0, "the most probable tokens to sample from; 0: all", check=whole(0))
    reward_model: str | None = option(None, "folder that reward.py wrote")
    reward_model_weight: float = option(1.0, "of the reward model in the score", check=finite())
    reward_functions: list[str] = field(
        default_factory=list,
        metadata=about("by name, as module:function or as file.py:function; see common/verifiers.py"),
    )
    reward_weights: list[float] = field(
        default_factory=list, metadata=about("one a reward function; not given: 1 each", check=finite())
    )
    missing_eos_penalty: float = option(
        0.0, "taken from the score of a response that did not end", check=finite(least=0)
    )
    frozen_format: str | None = option(
        None,
        "what the weights of frozen models (reference, reward) are stored in when all weights are trained; not given: "
        "the format in which the ds_config multiplies (FP8) or sends weights; none: 16 bits",
        choices=FROZEN_FORMATS,
    )
    sample_every: int = option(10, "iterations from one look at generated texts to the next; 0: none", check=whole(0))
    eval_batch: int = option(32, "held-out prompts that a rank answers at a time, greedily", check=whole(1))


@dataclass(kw_only=True)
class PPOArguments(RolloutArguments):
    """PPO."""

    critic_lr: float | None = option(None, "learning rate of the critic; not given: --lr", check=finite(least=0))
    ppo_epochs: int = option(1, "passes over a rollout", check=whole(1))
    clip: float = option(0.2, "range of the policy's probability ratio", check=finite(above=0))
    value_clip: float = option(0.2, "range around the old values; 0: no clipping", check=finite(least=0))
    gamma: float = option(1.0, "discount", check=finite(least=0, most=1))
    lam: float = option(0.95, "lambda of GAE", check=finite(least=0, most=1))
    kl_kind: str = option("k1", "estimator of the KL penalty; see common/advantage.py", choices=["k1", "k2", "k3"])
    kl_coefficient: float = option(0.1, "of the KL penalty in the rewards of tokens", check=finite(least=0))
    kl_target: float | None = option(
        None, "adapt the coefficient until a response's KL is this, in nats", check=finite(above=0)
    )
    kl_horizon: int = option(10_000, "responses over which the coefficient adapts", check=whole(1))
    reward_clip: float = option(5.0, "scores are cut to this range around 0; 0: not cut", check=finite(least=0))
    whiten_rewards: bool = option(False, "divide the rewards of tokens by their standard deviation over all ranks")
    whiten_advantages: bool = option(True, "advantages with mean 0 and variance 1 over all ranks")
    entropy_coefficient: float = option(0.0, "of the bonus for entropy", check=finite(least=0))
    pretraining_data: list[str] = field(default_factory=list, metadata=about("text rows for --pretraining_coefficient"))
    pretraining_coefficient: float = option(
        0.0, "of a language modelling loss on text, beside the policy's; 0: none", check=finite(least=0)
    )
    pretraining_tokens: int = option(256, "that a row of text is cut to", check=whole(2))
    ema_decay: float = option(
        0.0, "keep a moving average of the actor's weights; 0: none", check=finite(least=0, below=1)
    )
    ema_dtype: str = option("fp32", "of that average", choices=["fp32", "bf16"])
    ema_device: str = option(
        "model", "where it is kept: beside the model, or in the host's memory", choices=["model", "cpu"]
    )


@dataclass(kw_only=True)
class GRPOArguments(RolloutArguments):
    """GRPO."""

    group_size: int = option(8, "responses to a prompt, all of them on one rank", check=whole(2))
    grpo_epochs: int = option(1, "passes over a rollout", check=whole(1))
    scale: str = option(
        "group",
        "what an advantage is divided by: the standard deviation of its group, that of all rewards, or nothing",
        choices=["group", "batch", "none"],
    )
    loss: str = option(
        "dapo",
        "how tokens are averaged; see grpo_loss in common/losses.py",
        choices=["grpo", "bnpo", "dapo", "dr_grpo"],
    )
    clip_low: float = option(
        0.2, "how far the policy's probability ratio may fall below 1", check=finite(least=0, most=1)
    )
    clip_high: float = option(0.2, "how far it may rise above 1", check=finite(least=0))
    importance: str = option("token", "ratios of tokens, or of whole responses (GSPO)", choices=["token", "sequence"])
    ratio_limit: float | None = option(
        None, "the largest ratio where none is clipped; above 1 + --clip_high", check=finite(above=1)
    )
    beta: float = option(
        0.0, "of the KL divergence from the reference in the loss; 0: no reference is loaded", check=finite(least=0)
    )


@dataclass(kw_only=True)
class EvaluationArguments:
    """Which policies answer which prompts. The options mean what they mean for PPO."""

    models: list[str] = field(
        metadata=about("folders that stages wrote, or models; their last names name the files in --out")
    )
    out: str = required("folder for the answers", check=new_folder)
    deepspeed_config: str = required("path of the DeepSpeed JSON")
    data: list[str] = field(metadata=about("prompts, with the columns that the reward functions need"))
    reward_functions: list[str] = field(metadata=about("by name, as module:function or as file.py:function"))
    max_prompt_tokens: int = option(256, "longer prompts are left out", check=whole(1))
    max_new_tokens: int = option(256, "of a response", check=whole(1))
    eval_batch: int = option(32, "prompts that a rank answers at a time", check=whole(1))
    chat: bool = option(False, "put texts into the tokenizer's chat template, prompts as the user's turn")
    bad_rows: str = option("skip", "malformed rows: leave out, or stop at start", choices=["skip", "refuse"])
    lora_rank: int | None = option(
        None,
        "as in training; 0: adapters are merged; not given: they are not where the ds_config stores frozen weights",
        check=whole(0),
    )
    local_rank: int = option(-1, "given by the deepspeed launcher")

    def of(self, model: str) -> RolloutArguments:
        """As the parts that PPO shares take them."""
        shared = {name: value for name, value in vars(self).items() if name != "models"}
        return RolloutArguments(model=model, **shared)


@dataclass(kw_only=True)
class PipelineArguments:
    """The stages to run, their models and data, and their settings."""

    out: str = required("folder for everything", check=new_folder)
    stages: list[str] = field(
        default_factory=lambda: ["sft", "reward", "ppo"],
        metadata=about("in this order, each once", choices=list(STAGES)),
    )
    model: str | None = option(None, "where the first stage starts; not given: a random small Llama is made")
    data: str | None = option(None, "folder with files named as make_data.py names them; not given: they are made")
    recipe: str = option("zeropp", "of ds_configs/, or the path of a DeepSpeed JSON")
    settings: str | None = option(
        None, 'JSON: options of each stage by its name, and under "ds_config" what differs from the recipe\'s file'
    )
    changes: list[str] = field(
        default_factory=list,
        metadata=about("settings given here: STAGE.OPTION=VALUE, ds_config.KEY=VALUE", aliases=["--set"]),
    )
    metric: str = option("exact_match", "reward function of 0 and 1 that answers to held-out prompts are judged by")
    ranks: int = option(
        0,
        "processes, on as many GPUs, or on the CPU where there are fewer; 0: up to 4 GPUs, or 4 on the CPU",
        check=whole(0),
    )
    nodes: int = option(1, "this machine's ranks are treated as so many nodes", check=whole(1))
    seed: int = option(0, "of data, model and all stages", check=generator_seed)
    resume: bool = option(False, "go on with an earlier run in --out: finished stages are left as they are")
    replace: bool = option(False, "remove what an earlier run of these stages left in --out first")


# What a resumed run may do otherwise than the run it continues.
MAY_CHANGE = {
    "out", "deepspeed_config", "local_rank", "log_every", "save_every", "keep_checkpoints", "resume", "sample_every",
    "sample_tokens", "eval_data", "eval_every", "eval_batch", "generation_batch", "ema_device", "reference_cache",
}  # fmt: skip
LENGTHS = {"iterations", "steps", "epochs"}  # so may these, unless the learning rate depends on them


class FieldParser(Parser, HfArgumentParser):
    """A parser of a dataclass's fields. HfArgumentParser's type of an option is the field's; its "check" goes first."""

    def add_argument(self, *names: str, check: Callable[[str], object] | None = None, **more):
        """As argparse's."""
        return super().add_argument(*names, **(more | ({"type": check} if check else {})))


def parse(kind: type, description: str):
    """The command line as an object of `kind`; what cannot be is refused."""
    with refusals():
        (arguments,) = FieldParser(kind, description=description).parse_args_into_dataclasses()
    return arguments


def read_ds_config(arguments: RunArguments) -> dict:
    """The ds_config, see `checked_ds_config`."""
    path = arguments.deepspeed_config
    return checked_ds_config(load_ds_config(path), f"--deepspeed_config {path}")


def checked_ds_config(ds_config: dict, name: str) -> dict:
    """The ds_config, with the sizes of a step in it.

    Args:
        name: what an error calls it.

    Raises:
        ValueError: it is not for ZeRO stage 3, a size is no number, or the plugin cannot honour it.
    """
    resolve(ds_config)
    zero = ds_config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") != 3:
        raise ValueError(f'{name}: set "zero_optimization.stage" to 3; these scripts are for ZeRO-3')
    if "train_batch_size" in ds_config and not {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"} <= set(
        ds_config
    ):
        raise ValueError(
            f'{name}: "train_batch_size" alone does not say what a step is made of; give '
            '"train_micro_batch_size_per_gpu" and "gradient_accumulation_steps" instead'
        )
    sizes = {key: ds_config.get(key, 1) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
    for key, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f'{name}: "{key}" is {value!r}; give a number of at least 1')
    return ds_config | sizes


def settings(arguments: RunArguments, ds_config: dict, world: int) -> dict:
    """Everything that a resumed run must share with the run it continues, by the name that an error gives it."""
    free = MAY_CHANGE | (LENGTHS if arguments.schedule == "constant" else set())
    shared = {f"--{f.name}": getattr(arguments, f.name) for f in fields(arguments) if f.name not in free}
    return {**shared, "the ds_config": ds_config, "the number of ranks": world}


def check_rollout(arguments: RolloutArguments, ds_config: dict) -> None:
    """Refuse what could not be run, before anything is loaded.

    Raises:
        ValueError: names the argument and the remedy.
        FileNotFoundError, ModuleNotFoundError: a reward function's file or module is not there.
    """
    micro, accumulation = ds_config["train_micro_batch_size_per_gpu"], ds_config["gradient_accumulation_steps"]
    if arguments.rollout_batch % (micro * accumulation):
        raise ValueError(
            f"--rollout_batch {arguments.rollout_batch} does not divide into minibatches of {micro} (the ds_config's "
            f'"train_micro_batch_size_per_gpu") x {accumulation} ("gradient_accumulation_steps"): give a multiple of '
            f"{micro * accumulation}"
        )
    if not arguments.reward_model and not arguments.reward_functions:
        raise ValueError("nothing gives rewards: name --reward_model, --reward_functions, or both")
    for name in arguments.reward_functions:
        reward_function(name)
    if arguments.reward_weights and len(arguments.reward_weights) != len(arguments.reward_functions):
        raise ValueError(
            f"--reward_weights has {len(arguments.reward_weights)} numbers for {len(arguments.reward_functions)} "
            "--reward_functions; give one each"
        )
    if len(set(arguments.reward_functions)) < len(arguments.reward_functions):
        raise ValueError(f"--reward_functions {' '.join(arguments.reward_functions)}: name each once")
    if getattr(arguments, "kl_target", None) is not None and not arguments.kl_coefficient:
        raise ValueError("--kl_target changes --kl_coefficient by factors, and 0 would stay 0: give one above 0")
    if getattr(arguments, "pretraining_coefficient", 0) and not arguments.pretraining_data:
        raise ValueError("--pretraining_coefficient mixes in text rows: name them with --pretraining_data")


def check_preferences(arguments: DPOArguments) -> None:
    """Refuse a loss that does not exist, before anything is loaded.

    Raises:
        ValueError: names the argument and the remedy.
    """
    if arguments.label_smoothing and arguments.loss != "sigmoid":
        raise ValueError(
            f"--label_smoothing {arguments.label_smoothing} has no meaning with --loss {arguments.loss}: leave it out, "
            "or give --loss sigmoid"
        )


def check_groups(arguments: GRPOArguments) -> None:
    """Refuse groups and clip ranges that nothing could be learned with, before anything is loaded.

    Raises:
        ValueError: names the argument and the remedy.
    """
    size = arguments.group_size
    if arguments.rollout_batch % size:
        raise ValueError(
            f"--rollout_batch {arguments.rollout_batch} is not made of groups of --group_size {size}, which lie on one "
            f"rank each: give a multiple of {size}"
        )
    if arguments.ratio_limit is not None and arguments.ratio_limit <= 1 + arguments.clip_high:
        raise ValueError(
            f"--ratio_limit {arguments.ratio_limit} is not above 1 + --clip_high {arguments.clip_high}: give more, or "
            "leave it out"
        )


def check_length(tokens: int, config, because: str) -> None:
    """Refuse sequences that the model has no positions for.

    Args:
        config: of the model, from transformers.
        because: the arguments that ask for so many tokens.

    Raises:
        ValueError: names them.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and tokens > positions:
        raise ValueError(
            f"{because} make {tokens} tokens, but the model has {positions} positions (max_position_embeddings); "
            "give less"
        )


def check_sequences(arguments, config) -> None:
    """Refuse rows, and texts that are generated to be looked at, that the model has no positions for.

    Args:
        arguments: SFTArguments or DPOArguments.
        config: of the model, from transformers.

    Raises:
        ValueError: names the arguments.
    """
    if arguments.sample_every:
        check_length(arguments.max_tokens + arguments.sample_tokens, config, "--max_tokens and --sample_tokens")
    check_length(arguments.max_tokens, config, "--max_tokens")
