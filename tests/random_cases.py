"""A random model, what happens to it while it trains, and the configuration: one case, drawn from a seed.

A case is plain data: `text()` prints it and `parsed()` reads it again, so that a case that was made smaller than the
one its seed draws can be run again too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from models import ds_config, section
from random_models import draw_spans, draw_stages

from zeropp_fp8 import ConfigError
from zeropp_fp8.config import resolve
from zeropp_fp8.formats import make_format

# What a case may hold; a name that is left out is not drawn.
FEATURES = frozenset(
    {
        "allreduce again",  # engine.allreduce_gradients() after engine.backward()
        "called otherwise",  # by keyword, with several outputs, with a hook that computes the weight
        "checkpointed function",  # non-reentrant, over several modules
        "compile",  # blocks, by a backend that fuses nothing
        "early read",  # of a parameter by the parent, before its own module runs
        "fall back",  # to high precision, between two steps
        "freeze",  # and unfreeze, in mid-training
        "hand over",  # what has changed, to an engine that generates
        "looks",  # GatheredParameters and save_16bit_model in between
        "ranks differ",  # in what they use of a module's own parameters
        "reference",  # a second engine, written to from the first in one GatheredParameters
        "skip",  # stages that some steps leave out
        "writes",  # GatheredParameters(modifier_rank=0) in between
    }
)
SECTIONS: dict[str, list[dict[str, Any]]] = {
    "weights": [{"format": "int4", "hadamard": True}, {"format": "fp8_e4m3"}, {"format": "int8", "block_size": 32}],
    "secondary": [{"scope": "none"}, {"scope": "node"}, {"scope": "rank"}],
    "gradients": [
        {"block_size": 32},
        {"error_feedback": True},
        {"intra_format": "int8", "inter_format": "int8"},
        {"intra_format": "none", "inter_format": "none"},
        {"block_size": 64, "store_format": "fp8_e4m3"},
    ],
    "compute": [{"scaling": "current"}, {"scaling": "delayed"}, {"high_precision_gemms": ["grad_weight"]}],
}
QUANTIZED = ("zeropp", "zeropp-4bit", "fp8-lm-o1", "fp8-lm-o2", "fp8-lm", "mxfp8", "qlora")
# {a recipe that came later: the one whose places of odd seeds it takes}: a longer list would draw all cases anew.
INSTEAD_OF = {"fp8-lm-zeropp": "fp8-lm", "zeropp-pcie": "zeropp", "zeropp-exact": "zeropp-4bit"}
MEMORY_GB = ("auto", 5e-6, 0.0)  # of zeropp-pcie: for all of a model, a unit or two, none
COMPUTES = ("fp8-lm-o1", "fp8-lm-o2", "fp8-lm", "mxfp8", "fp8-lm-zeropp")
STATES = ("fp8-lm-o2", "fp8-lm", "fp8-lm-zeropp")  # these keep AdamW's states in low precision


@dataclass(frozen=True)
class Case:
    """The defaults are the simplest case there is; `smaller` goes back to them.

    `events`: texts "step:micro-batch:what" (`what` happens before that micro-batch's forward; a micro-batch number that
    equals the accumulation is after the last backward and before the step). `frozen`: stages frozen from the start.
    """

    seed: int = 0
    world: int = 2
    ranks_per_node: int = 1
    dtype: str = "fp32"
    width: int = 8
    stages: tuple[str, ...] = ("linear",)
    spans: tuple[str, ...] = ()
    tied: bool = False
    frozen: tuple[str, ...] = ()
    steps: int = 3
    accumulation: int = 1
    forwards: int = 1  # before one backward
    optimizer: str = "sgd"
    groups: int = 1
    clipping: float = 0.0
    zero_init: bool = False
    zero: dict[str, Any] = field(default_factory=dict)  # of zero_optimization, beyond models.ds_config
    recipe: str = "lossless"
    fields: dict[str, Any] = field(default_factory=dict)
    skips: tuple[str, ...] = ()  # "step:stage"
    ranks_differ: bool = False
    reference: str = ""  # a second engine: "same" recipe, or "stock"
    events: tuple[str, ...] = ()

    def text(self) -> str:
        """JSON of what differs from the defaults."""
        values = dataclasses.asdict(self)
        plain = dataclasses.asdict(Case())
        return json.dumps({name: value for name, value in values.items() if value != plain[name]})

    @property
    def granularity(self) -> str:
        return self.fields.get("gather_granularity", "block")

    @property
    def is_lossless(self) -> bool:
        return self.recipe == "lossless"

    @property
    def falls_back(self) -> bool:
        """Whether it ends in high precision, whatever its recipe."""
        return any(event.endswith(":fall") for event in self.events)

    @property
    def fills_stock_buckets(self) -> bool:
        """Whether gradients go into stock's buckets as they come; else in the order that the plugin has."""
        return self.is_lossless and self.granularity != "block"

    @property
    def neutral(self) -> tuple[str, ...]:
        """Events that change nothing of what comes afterwards."""
        return ("look", "save", "hand", "evaluate")

    @property
    def traits(self) -> set[tuple]:
        """Return what is drawn beside the recipe, without places."""
        named = ("world", "ranks_per_node", "dtype", "optimizer", "groups", "tied", "zero_init", "reference")
        traits = {(name, getattr(self, name)) for name in (*named, "ranks_differ")}
        traits |= {(name, bool(getattr(self, name))) for name in ("clipping", "frozen", "skips")}
        traits |= {(name, getattr(self, name) > 1) for name in ("accumulation", "forwards")}
        for texts in (self.stages, self.spans, self.events):
            traits |= {("texts", re.sub(r"\d+", "", text)) for text in texts}
        traits |= {("zero", name) for name in self.zero}
        return traits | {(name, str(value)) for name, value in self.fields.items()}

    @property
    def section(self) -> dict[str, Any]:
        """The plugin's."""
        given = dict(self.fields)
        if self.recipe in COMPUTES:
            given["compute"] = {"min_features": 16, **self.fields.get("compute", {})}
        if self.recipe == "qlora":  # under zero.Init it would store all linear ones, before any is frozen
            given["frozen"] = {"modules": "frozen"}
        return section(self.recipe, self.ranks_per_node, **given)

    @property
    def config(self) -> dict[str, Any]:
        """Further keys of the ds_config."""
        return {
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "zero_optimization": {**self.zero, "stage3_gather_16bit_weights_on_model_save": True},
        }

    def resolved(self):
        return resolve(ds_config(self.section, self.dtype, **self.config))


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences that a case may show.

    `loss`: of the engine's loss to that of its exact weights in one process, in training and in evaluation;
    `gradient`: the norm of the difference of the reduced gradient to the exact mean, over that one's norm; `losses`: of
    the losses of all steps to stock's.
    """

    loss: float
    gradient: float
    losses: float


LAYERS_OF_LOSS, LAYERS = 2, 3
# Of the root mean square that rounded weights give in ROUNDED draws.
ROUNDED, TIMES_LOSS, TIMES_GRADIENT = 16, 5, 3
_COMPUTED = {"forward": 0.045, "backward": 0.063}  # a linear layer's outputs and gradients: 27 dB and 24 dB
_BF16 = {"forward": 0.004, "backward": 0.03}  # half a step; and what is left where most of a gradient cancels
_NOTHING = {"forward": 1e-5, "backward": 1e-5}


@functools.cache
def rounding(name: str) -> float:
    """The relative rounding error of normal values in a format; with Hadamard rotation it holds for any values."""
    if name == "none":
        return 0.0
    fmt, values = make_format(name), torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    rounded = fmt.decode(fmt.encode(values), values.shape, values.dtype)
    return ((rounded - values).norm() / values.norm()).item()


def weight_error(case: Case) -> float:
    """The relative rounding error of a matrix on its way to the ranks, until a case falls back; of vectors none."""
    return rounding(case.resolved().weights.format)


def tolerance(case: Case, rounded_loss: float = 0.0, rounded_gradient: float = 0.0) -> Tolerance:
    """Return what the roundings of a recipe may add up to in these models.

    What errors of weights do depends on the model: 4-bit ones change a loss by 0.2 % to 35 %, a gradient by 7 % to
    130 %. So it is measured: `rounded_loss` and `rounded_gradient` are the root mean square of ROUNDED draws of noise
    of that size on the exact weights, in one process. The engine's error is one more draw. That of a loss, about
    normal, exceeds 5 times the root of 16 squares once in 8000 cases; that of a gradient is a norm over many numbers,
    0.3 to 1.6 times that root in 80 cases with 4-bit weights.

    A gradient is rounded on each hop, and where it is stored; with few numbers a single one may be off by twice the
    usual. Errors of computing add up over ten or twenty layers as their root: LAYERS times that of one for gradients,
    less for the loss, whose many tokens they are averaged over. `losses` are those of up to a dozen backward passes at
    rates at which every step changes the loss by some percent, and weights are multiplied by -1.5 in between: they
    tell a run that computes something else, not how exact it is.

    A case that has fallen back rounds nothing in its last step, which `loss` and `gradient` are of.
    """
    config = case.resolved()
    computed = _COMPUTED if config.computes_in_low_precision else _NOTHING
    dtype = _BF16 if case.dtype == "bf16" else _NOTHING
    formats = (config.gradients.intra_format, config.gradients.inter_format, config.gradients.store_format)
    reduced = sum(map(rounding, formats))
    forward = computed["forward"] + dtype["forward"]
    backward = forward + computed["backward"] + dtype["backward"]
    if case.falls_back:
        exact = tolerance(dataclasses.replace(case, recipe="lossless", fields={}, events=()))
        return dataclasses.replace(exact, losses=10 * LAYERS * (weight_error(case) + backward))
    return Tolerance(
        loss=TIMES_LOSS * rounded_loss + LAYERS_OF_LOSS * forward,
        gradient=TIMES_GRADIENT * rounded_gradient + LAYERS * backward + 2 * reduced,
        losses=10 * LAYERS * (weight_error(case) + backward),
    )


def covering(cases: list[Case]) -> list[Case]:
    """Few of the cases, in which no less meets.

    With `lossless`, which is compared bit for bit, every two traits that meet in any of them; with other recipes each
    trait and each recipe: how each recipe goes with each event has tests of its own.
    """
    meetings = [
        {frozenset(two) for two in combinations(case.traits, 2)}
        if case.is_lossless
        else {*case.traits, ("recipe", case.recipe)}
        for case in cases
    ]
    missing, chosen = set().union(*meetings), []
    while missing:
        best = max(range(len(cases)), key=lambda place: len(meetings[place] & missing) / cases[place].world)
        chosen.append(cases[best])
        missing -= meetings[best]
    return chosen


def parsed(text: str) -> Case:
    """The case that `Case.text` has printed."""
    values = json.loads(text)
    return Case(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def draw(seed: int, features: frozenset[str] = FEATURES) -> Case:
    """The case of a seed. The same seed and features draw the same case."""
    rng = random.Random(seed)
    while True:
        case = _draw(rng, seed, features)
        try:
            case.resolved()
        except ConfigError:
            continue
        return case


def _draw(rng: random.Random, seed: int, features: frozenset[str]) -> Case:
    recipe = "lossless" if rng.random() < 0.5 else rng.choice(QUANTIZED)
    later = [name for name, of in INSTEAD_OF.items() if of == recipe]
    if later and seed % 2:
        recipe = later[seed // 2 % len(later)]
    computes = recipe in COMPUTES
    world = rng.choice((1, 1, 2, 2, 2, 2, 2, 2, 2, 4))
    stages = draw_stages(rng, features)
    if computes:
        stages = (*stages, "sequential")  # linear layers that nobody shares: those of others stay as they are
    owning = [i for i, text in enumerate(stages) if text.partition(":")[0] not in ("again", "read", "regularize")]
    frozen = [f"{i}" for i in owning if rng.random() < 0.3] if rng.random() < 0.3 or recipe == "qlora" else []
    steps = rng.randint(2, 4)
    accumulation = rng.choice((1, 1, 1, 1, 2, 3))
    case = Case(
        seed=seed,
        world=world,
        ranks_per_node=rng.choice([n for n in (1, 2, 4) if world % n == 0]),
        dtype=rng.choice(("fp32", "fp32", "bf16")),
        width=rng.choice((16, 32) if computes else (3, 7, 8, 16, 32)),
        stages=stages,
        spans=draw_spans(rng, stages, features),
        tied=rng.random() < 0.2,
        frozen=tuple(frozen),
        steps=steps,
        accumulation=accumulation,
        forwards=rng.choice((1, 1, 1, 1, 2)),
        optimizer="adamw" if recipe in STATES else rng.choice(("sgd", "momentum", "adamw", "adamw")),
        groups=rng.choice((1, 2)),
        clipping=rng.choice((0.0, 0.0, 1.0, 0.05)),
        zero_init=rng.random() < 0.4,
        zero=_draw_zero(rng),
        recipe=recipe,
        fields=_draw_fields(rng, recipe),
        reference=rng.choice(("same", "stock")) if "reference" in features and rng.random() < 0.1 else "",
    )
    if recipe == "zeropp-exact":  # of weights in 16 bits
        case = dataclasses.replace(case, dtype="bf16")
    if "weight_norm" in case.stages:  # which zero.Init leaves no numbers to make its parameters of
        case = dataclasses.replace(case, zero_init=False)
    if case.is_lossless or rng.random() < 0.9:
        case = _that_stock_can(case)
    else:  # stock shall raise, which it does in buckets of its usual size
        case.zero.pop("reduce_bucket_size", None)
    if case.is_lossless and case.world > 2 and not case.fills_stock_buckets:
        # gloo adds more than two ranks in an order that depends on the place in a bucket. The plugin's own order fills
        # other buckets than stock, and holds places for zeros: every gradient has a bucket of its own.
        case.zero["reduce_bucket_size"] = 1
    if recipe == "zeropp-pcie":
        case.fields["secondary"] = {"memory_gb": MEMORY_GB[seed // 2 % len(MEMORY_GB)]}
    differs = "ranks differ" in features and any(text.endswith(":branchy") for text in stages)
    differs = differs and not case.fills_stock_buckets and not any("non-re" in text for text in case.spans)
    case = dataclasses.replace(case, ranks_differ=differs and rng.random() < 0.8)
    case = dataclasses.replace(
        case,
        skips=_draw_skips(rng, case) if "skip" in features and rng.random() < 0.3 else (),
        events=tuple(_draw_events(rng, case, features)),
    )
    if case.accumulation > 1 and not case.is_lossless and rng.random() < 0.3:  # else in the node, as memory allows
        case.fields["gradients"] = {**case.fields.get("gradients", {}), "accumulate_in": "world"}
    # torch gives up on functions that read codes as numbers, for all blocks of the class; not in the middle of a pass.
    blocks = [text for text in case.stages if text.startswith("blocks")]
    has_blocks = case.granularity == "block" and blocks and not any(text.endswith(":reads") for text in blocks)
    if has_blocks and not case.is_lossless and "compile" in features and rng.random() < 0.8:
        case.fields["compile"] = "blocks"  # which may change a last bit
    if not case.is_lossless:
        later = random.Random(f"{seed}, left exact")
        _leave_exact(later, case.fields, stages, computes)
        if "fall back" in features and later.random() < 0.25:
            fall = f"{later.randrange(steps)}:0:fall"
            case = dataclasses.replace(case, events=(*case.events, fall))
    hands = random.Random(f"{seed}, handed over")
    if "hand over" in features and hands.random() < 0.4:
        handed = tuple(f"{step}:0:hand" for step in sorted(hands.sample(range(steps), 2)))
        case = dataclasses.replace(case, events=(*case.events, *handed))
    return case


def _leave_exact(rng: random.Random, fields: dict[str, Any], stages: tuple[str, ...], computes: bool) -> None:
    """Add to the fields of a section what travels, or is multiplied, in high precision in some layers.

    `rng` is one of its own: these keys came later, and the other cases stay as they are.
    """

    def add(name: str, **more: Any) -> None:
        fields[name] = {**fields.get(name, {}), **more}

    def some() -> list[str]:
        return rng.choice(([f"stages.{rng.randrange(len(stages))}"], ["*[02468]"], ["*weight"], ["bias", "head*"]))

    for name in ("weights", "gradients"):
        if rng.random() < 0.2:
            add(name, skip_modules=some())
    if computes and rng.random() < 0.4:
        gemms = rng.sample(("output", "grad_input", "grad_weight"), rng.choice((1, 1, 2)))
        add("compute", high_precision_gemms=rng.choice((gemms, {gemm: some() for gemm in gemms})))


def _that_stock_can(case: Case) -> Case:
    """Without what stock ZeRO-3 cannot do, and `lossless`, which does what stock does, cannot either.

    A parameter that is used in a function with reentrant checkpointing and once more (outside, or in a second forward)
    has several gradients in a backward. Stock raises where two of them meet in a bucket, and where they do not the last
    one replaces the others: gradients 50 % to 70 % off. Its z3 leaf modules do not go with two forwards either. All
    other recipes add the gradients up.
    """
    shares = case.tied or case.forwards > 1
    shares = shares or any(text.startswith(("again", "tied", "read", "regularize")) for text in case.stages)
    if shares:
        case = dataclasses.replace(case, spans=tuple(text for text in case.spans if "non-reentrant" in text))
    if case.granularity == "block" and case.is_lossless and any(text.startswith("blocks") for text in case.stages):
        case = dataclasses.replace(case, forwards=1)
    return case


def _draw_zero(rng: random.Random) -> dict[str, Any]:
    zero: dict[str, Any] = {}
    if rng.random() < 0.5:
        zero["stage3_param_persistence_threshold"] = rng.choice((9, 40, 10**6))
    if rng.random() < 0.5:
        zero["stage3_prefetch_bucket_size"] = rng.choice((200, 10**6))
        zero["stage3_max_live_parameters"] = rng.choice((400, 10**9))
        zero["stage3_max_reuse_distance"] = rng.choice((0, 300, 10**9))
    if rng.random() < 0.4:
        zero["reduce_bucket_size"] = rng.choice((50, 500))
    if rng.random() < 0.3:
        zero["overlap_comm"] = rng.random() < 0.5
    if rng.random() < 0.3:
        zero["contiguous_gradients"] = rng.random() < 0.5
    return zero


def _draw_fields(rng: random.Random, recipe: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if rng.random() < 0.5:
        fields["gather_granularity"] = rng.choice(("module", "module", "parameter"))
    if rng.random() < 0.4:
        fields["secondary"] = rng.choice(SECTIONS["secondary"])
    if recipe == "lossless":
        return fields
    if rng.random() < 0.3:
        fields["weights"] = rng.choice(SECTIONS["weights"])
    if rng.random() < 0.3:
        fields["gradients"] = rng.choice(SECTIONS["gradients"])
    if recipe in COMPUTES and rng.random() < 0.3:
        fields["compute"] = rng.choice(SECTIONS["compute"])
    if recipe != "fp8-lm" and rng.random() < 0.15:
        fields["partition"] = "whole_tensor"
    return fields


def _draw_skips(rng: random.Random, case: Case) -> tuple[str, ...]:
    places = [i for i, text in enumerate(case.stages) if text not in ("dropout", "unused")]
    return tuple(f"{step}:{rng.choice(places)}" for step in range(case.steps) if places and rng.random() < 0.4)


def _draw_events(rng: random.Random, case: Case, features: frozenset[str]) -> Iterator[str]:
    kinds = ["evaluate"]
    kinds += ["look", "save"] if "looks" in features else []
    kinds += ["write"] if "writes" in features else []
    kinds += ["freeze", "unfreeze"] if "freeze" in features else []
    kinds += ["allreduce"] if "allreduce again" in features else []
    drawn = rng.choices(kinds, k=rng.choice((0, 0, 1, 2, 3))) + ["sync"] * bool(case.reference)
    for kind in drawn:
        step = rng.randrange(case.steps)
        if kind == "allreduce":
            place = case.accumulation
        elif kind in ("evaluate", "look"):
            place = rng.choice((0, rng.randrange(case.accumulation)))
        else:
            place = 0
        if kind in ("freeze", "unfreeze", "look", "write"):
            kind += f":{rng.choice(('all', *range(len(case.stages))))}"
        yield f"{step}:{place}:{kind}"


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are simpler than `case` in one way each."""
    plain = Case()
    for name in ("events", "skips", "spans", "frozen"):
        values = getattr(case, name)
        if len(values) > 1:
            yield dataclasses.replace(case, **{name: ()})
        for index in range(len(values)):
            yield dataclasses.replace(case, **{name: values[:index] + values[index + 1 :]})
    for name in ("zero", "fields"):
        values = getattr(case, name)
        for key in values:
            yield dataclasses.replace(case, **{name: {k: v for k, v in values.items() if k != key}})
    for item in dataclasses.fields(Case):
        if item.name in ("events", "skips", "spans", "frozen", "zero", "fields", "stages", "recipe"):
            continue
        if getattr(case, item.name) != getattr(plain, item.name):
            yield dataclasses.replace(case, **{item.name: getattr(plain, item.name)})
    for steps in range(1, case.steps):
        yield dataclasses.replace(case, steps=steps)
    for index in range(len(case.stages)):
        fewer = _without_stage(case, index)
        if fewer is not None:
            yield fewer
    for index, text in enumerate(case.stages):
        if text.startswith("blocks:3:"):
            stages = (*case.stages[:index], text.replace(":3:", ":2:"), *case.stages[index + 1 :])
            yield dataclasses.replace(case, stages=stages)


def _without_stage(case: Case, index: int) -> Case | None:
    """The case without one stage, or None where something else names it."""
    named = [text.partition(":")[2] for text in case.stages if not text.startswith("blocks")]
    named += [text.partition(":")[2] for text in case.skips]
    named += [text.split(":")[3] for text in case.events if text.count(":") == 3]
    if str(index) in named or str(index) in case.frozen or case.spans or len(case.stages) == 1:
        return None

    def moved(number: str) -> str:
        return str(int(number) - 1) if number.isdigit() and int(number) > index else number

    def rest(text: str) -> str:
        head, _, number = text.rpartition(":")
        return f"{head}:{moved(number)}" if head and not text.startswith("blocks") else text

    stages = tuple(rest(text) for place, text in enumerate(case.stages) if place != index)
    return dataclasses.replace(
        case,
        stages=stages,
        skips=tuple(rest(text) for text in case.skips),
        events=tuple(rest(text) if text.count(":") == 3 else text for text in case.events),
        frozen=tuple(moved(number) for number in case.frozen),
    )
