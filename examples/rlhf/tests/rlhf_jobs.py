"""Jobs about the RLHF examples: their scripts, and the parts that only several ranks show."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from models import ds_config, full_weights, section
from ranks import attempt, printed
from running import switch

from zeropp_fp8 import sharded

RLHF = Path(__file__).resolve().parents[1]
KEPT_GATHERED = {"zero_optimization": {"stage3_param_persistence_threshold": 100}}


def config_of(recipe, overrides=None, **fields):
    """A ds_config of micro-batches of 2, two of them a step."""
    made = None if recipe is None else section(recipe, ranks_per_node=1, **fields)
    return ds_config(made, **{"gradient_accumulation_steps": 2, **(overrides or {})})


def arguments_of(kind, folder, config, **given):
    """The arguments of a script, without its command line."""
    from common import arguments

    path = Path(folder, f"ds_config{dist.get_rank()}.json")
    path.write_text(json.dumps(config))
    needed = {"out": str(folder), "deepspeed_config": str(path), "data": ["none"]}
    return getattr(arguments, kind)(**{**needed, **given})


def script(name, config, folder, argvs, draws=False):
    """Run a script's main() with one command line after the other; only the last may come to its end.

    Without `draws` it draws no log: importing matplotlib and a picture take 0.7 s, as long as a third of a run.

    Returns:
        (what each raised or None, the log without times, what was printed)
    """
    path, raised = Path(folder, "ds_config.json"), []
    if dist.get_rank() == 0:
        path.write_text(json.dumps(config))
    dist.barrier()
    importlib.import_module("options").PATIENCE = 0  # every rank has a reason of its own
    monitor = importlib.import_module("common.monitor")
    drawn = monitor.draw_curves
    if not draws:
        monitor.draw_curves = _draw_nothing
    for argv in argvs:
        sys.argv = [name, "--deepspeed_config", str(path), "--out", str(folder), *argv]
        said = attempt(importlib.import_module(name).main)
        raised.append(None if said == "nothing raised" else said)
    monitor.draw_curves = drawn
    return raised, steps_of(Path(folder, "log.jsonl")), printed()


def _draw_nothing(log_paths, keys, out_png):
    """Instead of draw_curves."""


TIMES = ("_s", "_mb", "_gb", "seconds")


def steps_of(log):
    """{step: its numbers}, without times, bytes and memory."""
    steps = {}
    for row in (json.loads(line) for line in log.read_text().splitlines()) if log.exists() else ():
        numbers = {name: value for name, value in row.items() if not name.endswith(TIMES) and name != "step"}
        steps.setdefault(row["step"], {}).update(numbers)
    return steps


# -- PPO, step by step ------------------------------------------------------------------------------------------------


class Ppo:
    """The models and one rollout of PPO."""

    def __init__(self, folder, config, count=8, **given):
        import ppo
        from common.models import load_tokenizer
        from common.roles import load_critic_and_reward, load_policy_and_reference
        from common.rollout import Sampling, roll_out

        switch(True)
        self.ppo = ppo
        self.arguments = arguments_of("PPOArguments", folder, config, max_new_tokens=6, lr=1e-2, **given)
        self.tokenizer = load_tokenizer(given["model"])
        self.actor, self.reference = load_policy_and_reference(self.arguments, config, steps=10)
        self.critic, self.reward = load_critic_and_reward(self.arguments, config, self.tokenizer, steps=10)
        prompts = [self.tokenizer.encode(f"{i}+{i * dist.get_rank()}=") for i in range(count)]
        sampling, rank = Sampling(6, temperature=0.7), dist.get_rank()
        self.arguments.temperature = 0.7
        self.rollout = roll_out(self.actor, self.tokenizer, prompts, sampling, seed=rank)

    def experience(self, scores=None):
        """(experience, KL of each response)."""
        if scores is None:
            scores = torch.linspace(-1, 1, len(self.rollout)) + dist.get_rank()
        models = self.actor, self.reference, self.critic
        return self.ppo.make_experience(self.arguments, *models, self.rollout, scores, 0.1)

    def train(self, experience, iteration=0, **more):
        """Figures of the micro-batches."""
        return self.ppo.train_on(self.arguments, self.actor, self.critic, experience, iteration, **more)


def first_iterations(folder, recipe, **given):
    """KL and ratios before the first step, in other micro-batches too, and that both move afterwards."""
    from common.roles import logprobs_of

    run = Ppo(folder, config_of(recipe, given.pop("overrides", None)), **given)
    experience, kl = run.experience()
    ratios = {}
    for name, order in (("as they come", range(8)), ("mixed", [5, 2, 7, 0, 1, 6, 3, 4])):
        for part in experience.rows(order).parts(2):
            ratio = (logprobs_of(run.actor, part, 0.7) - part.old_logprobs).exp()
            off = (ratio - 1)[part.response_mask].abs().max().item()
            ratios[name] = max(off, ratios.get(name, 0.0))
    figures = run.train(experience)
    _, later = run.experience()
    return {
        "kl": kl.tolist(),
        "ratios off 1": ratios,
        "clip fraction of the first step": [float(each["clip_fraction"]) for each in figures[:2]],
        "approximate kl": [float(each["approx_kl"]) for each in figures[:2]],
        "clip fractions": [float(each["clip_fraction"]) for each in figures],
        "kl afterwards": later.tolist(),
        "engines": len({id(role.engine) for role in (run.actor, run.reference, run.critic)}),
        "stored": sum(sharded.known(p).stored is not None for p in run.reference.engine.module.parameters()),
    }


def shared_backbone(folder, recipe, **given):
    """Critic and reward model over one quantized backbone, while the critic trains."""
    from common.roles import in_parts, scores_of, values_of

    run = Ppo(folder, config_of(recipe), **given)
    engine = run.critic.engine

    def scores():
        return in_parts(lambda part: scores_of(run.reward, part), run.rollout, 2)

    def values():
        return in_parts(lambda part: values_of(run.critic, part), run.rollout, 2)

    experience, _ = run.experience()
    before, weights, codes = scores(), full_weights(engine.module), stored_codes(engine.module)
    as_reward = values()  # the critic begins as the reward model
    run.train(experience)
    after = full_weights(engine.module)
    changed = [name for name in weights if not torch.equal(weights[name], after[name])]
    return {
        "one engine": run.reward.engine is engine,
        "scores before": before.tolist(),
        "scores after": scores().tolist(),
        "critic moved": (values() - as_reward).abs().max().item(),
        "critic began as reward": torch.equal(as_reward[:, -1:], scores_at_second_last(run)),
        "changed": changed,
        "trained": [name for name, param in engine.module.named_parameters() if param.requires_grad],
        "codes": len(codes),
        "codes stay": all(torch.equal(codes[n], c) for n, c in stored_codes(engine.module).items()),
        "backbones": sum("layers.0.self_attn.q_proj.base_layer" in name for name in weights),
    }


@torch.no_grad()
def scores_at_second_last(run):
    rows = [run.reward(part.input_ids, part.attention_mask)[:, -2:-1] for part in run.rollout.parts(2)]
    return torch.cat(rows)


def stored_codes(model):
    return {n: p.ds_tensor.detach().clone() for n, p in model.named_parameters() if sharded.known(p).stored is not None}


def averages(folder, recipe, decay, dtype="fp32", overrides=None, **given):
    """A moving average beside one of the whole weights in float64, and what its export writes."""
    from common.ema import WeightAverage
    from common.models import save_model

    run = Ppo(folder, config_of(recipe, overrides), **given)
    model = run.actor.engine.module
    average = WeightAverage(run.actor.engine, decay, dtype)
    wanted = {name: weight.double() for name, weight in full_weights(model).items()}
    updates = []

    class Recording:
        def update(self):
            average.update()
            updates.append(1)
            for name, weight in full_weights(model).items():
                wanted[name] = decay * wanted[name] + (1 - decay) * weight.double()

    experience, _ = run.experience()
    run.train(experience, average=Recording())
    before = full_weights(model)
    run.experience()  # small weights may stay gathered from this pass
    with average.in_place():
        inside = full_weights(model)
        save_model(model, Path(folder, "average"), run.tokenizer, run.actor.adapter)
    after = full_weights(model)
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    again = run.train(run.experience()[0], iteration=1)  # goes on afterwards
    return {
        "updates": len(updates),
        "largest error": max((inside[name] - wanted[name]).abs().max().item() for name in trained),
        "distance to the weights": max((inside[name] - before[name]).abs().max().item() for name in trained),
        "frozen stay": all(torch.equal(inside[name], before[name]) for name in before if name not in trained),
        "weights come back": all(torch.equal(after[name], before[name]) for name in before),
        "goes on": all(torch.isfinite(value) for each in again for value in each.values()),
        "inside": {name: inside[name] for name in trained} if dist.get_rank() == 0 else None,
    }


def gradients(folder, recipe, text, **given):
    """The actor's gradients of one optimizer step in full, and what they are made of."""
    from deepspeed.utils import safe_get_full_grad

    given |= {"pretraining_data": [text], "pretraining_tokens": 12, "pretraining_coefficient": 0.7}
    run = Ppo(folder, config_of(recipe, {"gradient_accumulation_steps": 1}), count=2, entropy_coefficient=0.3, **given)
    experience, _ = run.experience()
    kept, engine = {}, run.actor.engine
    mixed = run.ppo.PretrainingText(run.arguments, run.tokenizer)
    step, engine.step = engine.step, lambda: None

    def keep_and_step():
        kept.update({n: safe_get_full_grad(p).clone() for n, p in engine.module.named_parameters() if p.requires_grad})
        step()

    engine.step = keep_and_step
    figures = run.train(experience, text=mixed)
    texts = [mixed._items[index] for index in mixed._order.batch(0, dist.get_rank(), dist.get_world_size(), 2)]
    numbers, loss, of_first_step = [], mixed.loss, dict(kept)
    mixed.loss = lambda actor, number: (numbers.append(number), loss(actor, number))[1]
    run.arguments.ppo_epochs = 2
    run.train(experience, iteration=3, text=mixed)
    fields = {name: getattr(experience, name) for name in experience.__dataclass_fields__}
    return of_first_step, fields, texts, figures[0], numbers


def other_engine(folder, recipe, fields=None, **given):
    """A stand-in engine gets the policy's merged weights and answers like the policy itself."""
    from common.models import transformers_model
    from common.rollout import Sampling, roll_out
    from transformers import LlamaForCausalLM

    run = Ppo(folder, config_of(recipe, **(fields or {})), **given)
    run.train(run.experience()[0])
    codes, taken = stored_codes(run.actor.engine.module), {}

    class StandIn:
        def update_weights(self, names_and_tensors):
            taken.update({name: tensor.clone() for name, tensor in names_and_tensors})
            self.model = LlamaForCausalLM(transformers_model(run.actor.engine.module).config).eval()
            self.loaded = self.model.load_state_dict(taken, strict=False)

        def generate(self, prompts, sampling, seed):
            answers = []
            for prompt in prompts:
                ids = torch.tensor([prompt])
                made = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=sampling.max_new_tokens,
                    eos_token_id=run.tokenizer.eos_token_id, pad_token_id=run.tokenizer.pad_token_id,
                )  # fmt: skip
                answers.append(made[0, len(prompt) :].tolist())
            return answers

    stand_in = StandIn()
    prompts = [run.tokenizer.encode(f"{i}-{i}") for i in range(3 + dist.get_rank())]
    # All ranks must come along with the gathers: the same number of weights, whatever they generate.
    by_other = roll_out(run.actor, run.tokenizer, prompts, Sampling(5, greedy=True), seed=0, other=stand_in)
    own = roll_out(run.actor, run.tokenizer, prompts, Sampling(5, greedy=True), seed=0)
    return {
        "all there": not stand_in.loaded.missing_keys and not stand_in.loaded.unexpected_keys,
        "answers": (by_other.input_ids.tolist(), own.input_ids.tolist()),
        "codes stay": all(torch.equal(codes[n], c) for n, c in stored_codes(run.actor.engine.module).items()),
        "goes on": len(run.train(run.experience()[0], iteration=1)),
    }


# -- the parts --------------------------------------------------------------------------------------------------------


class FakeEngine:
    """Saves a number, or fails, as an engine does."""

    def __init__(self, number):
        self.number, self.fails = number, False

    def save_checkpoint(self, folder, tag, **options):
        if self.fails:
            raise OSError("no space left")
        torch.save(self.number, Path(folder, f"{tag}{dist.get_rank()}"))

    def load_checkpoint(self, folder, tag, **options):
        self.number = torch.load(Path(folder, f"{tag}{dist.get_rank()}"))
        return folder, {}


class Command:
    """Pickled, a call: unpickling it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.makedirs, (self.path, 0o777, True)


class Counter:
    def __init__(self, number):
        self.number = number

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def checkpoints(folder):
    """Saving, crashes in the middle of it, and what is gone on with."""
    from common.state import Checkpoints

    rank, log = dist.get_rank(), {}
    config = {"zero_optimization": {"stage": 3}}

    def run(out="run", **given):
        given = {"keep_checkpoints": 2, "model": "m", "reward_functions": ["exact_match"], **given}
        arguments = arguments_of("PPOArguments", folder, config, **given)
        arguments.out, arguments.deepspeed_config = str(Path(folder, out)), "c"
        return Checkpoints(arguments, config, {"the number of prompts": 5})

    def folders():
        dist.barrier()
        names = {path.name for path in Path(folder, "run", "checkpoints").iterdir()}
        dist.barrier()
        return sorted(names - {"step3 is good"}) if "step3 is good" in names else "the user's is gone"

    def resumed(**given):
        """Return what a new process would go on with."""
        again, more = FakeEngine(-1), Counter(-1)
        torch.manual_seed(99)
        step = run(resume=True, **given).begin({"actor": again}, {"more": more})
        return step, again.number, more.number, torch.rand(1).item()

    log["nothing to resume"] = attempt(lambda: run(resume=True))
    saved, engine, counter = run(), FakeEngine(10 * rank), Counter(rank)
    dist.barrier()  # as loading a model is in a run
    log["fresh"] = saved.begin({"actor": engine}, {"more": counter})
    torch.manual_seed(rank)
    Path(folder, "run", "checkpoints", "step3 is good").mkdir(parents=True, exist_ok=True)  # a user's
    for step in (3, 6, 9):
        engine.number, counter.number = 10 * rank + step, rank - step
        saved.save(step)
    wanted = torch.rand(1).item()
    log["kept"] = folders()
    log["resumed"] = resumed() == (9, 10 * rank + 9, rank - 9, wanted)
    log["fresh again"] = attempt(run)
    dist.barrier()

    engine.fails = True
    log["engine fails"] = attempt(lambda: saved.save(12))
    log["after it"] = resumed() == (9, 10 * rank + 9, rank - 9, wanted), folders()
    engine.fails = False
    counter.state_dict = lambda: {} if rank == 0 else 1 / 0  # on one rank alone
    log["one rank fails"] = attempt(lambda: saved.save(12))
    log["after that"] = resumed() == (9, 10 * rank + 9, rank - 9, wanted)
    del counter.state_dict
    engine.number, counter.number = 10 * rank + 12, rank - 12
    saved.save(12)
    log["at last"] = resumed()[:3] == (12, 10 * rank + 12, rank - 12), folders()

    log["other settings"] = [
        attempt(lambda given=given: run(resume=True, **given))
        for given in ({"lr": 2e-5}, {"reward_functions": ["gsm8k"]}, {"schedule": "cosine"})
    ]
    log["free settings"] = attempt(lambda: run(resume=True, iterations=7, save_every=3))
    made = Path(folder, f"made{rank}")
    torch.save({"random": Command(str(made))}, Path(folder, "run", "checkpoints", "step12", f"rank{rank}.pt"))
    log["code in a checkpoint"] = attempt(resumed), made.exists()
    return log


def failing_rewards(folder, reward):
    """A reward function that fails on one rank."""
    from common.rewards import Rewards, columns_for, load_functions
    from common.rollout import as_rollout
    from common.tokenizer import make_byte_tokenizer

    arguments = arguments_of("PPOArguments", folder, {}, model="m", reward_functions=[reward, "exact_match"])
    functions = load_functions(arguments)
    arguments.reward_weights, arguments.missing_eos_penalty = [2.0, 0.5], 3.0
    rewards, tokenizer = Rewards(arguments, functions), make_byte_tokenizer()

    def score(fail):
        rollout = as_rollout([[1], [2]], [[65, 257], [66]], [257], tokenizer)
        columns = [
            {"prompt": "p", "answer": "A", "fail": fail, "rank": dist.get_rank()},
            {"prompt": "q", "answer": "X"},
        ]
        scores, parts = rewards(rollout, columns, ["p", "q"])
        return scores.tolist(), {name.rpartition(":")[2]: part.tolist() for name, part in parts.items()}

    return attempt(lambda: score(fail=True)), score(fail=False), columns_for(functions)


class Still:
    """An engine that has nothing to do."""

    device = "cpu"

    def train(self):
        pass

    def eval(self):
        pass


def held_out_means(counts, size):
    """[(passes of this rank, mean of pairs, mean of tokens)] for numbers of items; the i-th says i."""
    from common.supervised import _evaluate

    found = []
    for count in counts:
        pairs = [{"chosen": i} for i in range(count)]
        texts = [{"value": float(i), "response_mask": [True] * (i + 1) + [False]} for i in range(count)]
        passes, engine = [], Still()

        def of_pairs(batches, passes=passes):
            passes.extend(batches)
            for batch in batches:
                yield None, {"said": torch.tensor([float(pair["chosen"]) for pair in batch]).mean()}

        def of_tokens(batches):
            for batch in batches:
                tokens = [text["value"] for text in batch for learned in text["response_mask"] if learned]
                yield None, {"said": torch.tensor(tokens).mean()}

        means = [_evaluate(engine, losses, items, size) for losses, items in ((of_pairs, pairs), (of_tokens, texts))]
        found.append((len(passes), *(mean["eval_said"] for mean in means)))
    return found


def part_that_one_rank_has():
    """The mean of a reward that rank 0 alone has of its responses, one of two."""
    from common.figures import rollout_figures
    from common.monitor import mean_over_ranks
    from common.rollout import as_rollout
    from common.tokenizer import make_byte_tokenizer

    rollout = as_rollout([[1], [2]], [[65, 257], [66]], [257], make_byte_tokenizer())
    part = torch.tensor([4.0 if dist.get_rank() == 0 else float("nan"), float("nan")])
    return mean_over_ranks(rollout_figures(rollout, torch.zeros(2), {"mine": part}))["reward_mine"]


def evaluation(folder, model, counts):
    """Held-out prompts dealt to ranks; each is answered once, in order."""
    from common.evaluation import evaluate
    from common.models import load_tokenizer
    from common.prompts import Prompts
    from common.rewards import Rewards, load_functions
    from common.roles import load_policy_and_reference

    switch(True)
    config = config_of("zeropp")
    arguments = arguments_of("PPOArguments", folder, config, model=model, reward_functions=["exact_match"])
    policy, _ = load_policy_and_reference(arguments, config, steps=1)
    tokenizer, rewards, logs = load_tokenizer(model), Rewards(arguments, load_functions(arguments)), []
    for count in counts:
        texts = [f"{i}*{i}=" for i in range(count)]
        columns = [{"prompt": text, "answer": "never" if i % 2 else None} for i, text in enumerate(texts)]
        prompts = Prompts(columns, [tokenizer.encode(text) for text in texts], texts)
        means, rows = evaluate(policy, tokenizer, prompts, rewards, max_new_tokens=4, batch=2)
        logs.append((means, rows))
    return logs


def together(fails):
    """Return what ranks raise when some of them fail."""
    from basics import failing_together

    def go():
        with failing_together("counting"):
            if dist.get_rank() in fails:
                raise KeyError(f"of rank {dist.get_rank()}")

    return attempt(go), dist.get_world_size()


def evaluated(folder, config, models, rows):
    """Models that are there whenever evaluate.py is about to load one."""
    from transformers import LlamaForCausalLM

    evaluate_py, there = importlib.import_module("evaluate"), []
    load = evaluate_py.load_policy

    def load_policy(*args):
        there.append(sum(issubclass(type(found), LlamaForCausalLM) for found in gc.get_objects()))
        return load(*args)

    evaluate_py.load_policy = load_policy
    argv = ["--models", *models, "--data", rows, "--reward_functions", "exact_match"]
    argv += ["--max_prompt_tokens", "9", "--max_new_tokens", "4"]
    raised, *_ = script("evaluate", config, folder, [argv])
    return raised, there
