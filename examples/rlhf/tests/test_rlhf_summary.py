"""A pipeline's summary: intervals against their definitions, figures, lines and the picture of small made runs."""

import json
import math
import random
from statistics import NormalDist

import evaluate
import numpy as np
import pytest
from common import summary
from common.arguments import EvaluationArguments
from common.intervals import paired_difference, wilson_interval
from hypothesis import example, given, settings
from hypothesis import strategies as st

Z = NormalDist().inv_cdf(0.975)


# -- intervals --------------------------------------------------------------------------------------------------------


def counts(most=3000):
    return st.integers(1, most).flatmap(lambda count: st.tuples(st.integers(0, count), st.just(count)))


def roots_of_wilson(right, count):
    """Where the distance of the seen rate from p is Z standard deviations of p, by bisection."""
    rate = right / count

    def outside(p):
        return (rate - p) ** 2 > Z**2 * p * (1 - p) / count

    ends = []
    for out, inside in ((0.0, rate), (1.0, rate)):
        if not outside(out):
            ends.append(out)
            continue
        for _ in range(200):
            middle = (out + inside) / 2
            out, inside = (middle, inside) if outside(middle) else (out, middle)
        ends.append(out)
    return ends


@settings(derandomize=True, max_examples=300)
@given(counts())
@example((0, 1))
@example((1, 1))
@example((0, 3000))
@example((3000, 3000))
def test_wilson_solves_its_equation(pair):
    right, count = pair
    low, high = wilson_interval(right, count)
    assert [low, high] == pytest.approx(roots_of_wilson(right, count), abs=1e-6)
    assert 0 <= low <= right / count <= high <= 1 and high - low > 0
    assert wilson_interval(count - right, count) == pytest.approx((1 - high, 1 - low), abs=1e-12)


@pytest.mark.parametrize(
    "right, count, low, high",
    # R. G. Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(right, count, low, high):
    assert wilson_interval(right, count) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("right, count", [(0, 0), (-1, 5), (6, 5)])
def test_no_rate_no_interval(right, count):
    with pytest.raises(ValueError, match=f"wilson_interval: {right} right answers of {count}"):
        wilson_interval(right, count)


def answers(both, lost, gained, neither):
    """(before, after) with so many questions of each kind, mixed."""
    pairs = [(True, True)] * both + [(True, False)] * lost + [(False, True)] * gained + [(False, False)] * neither
    random.Random(0).shuffle(pairs)
    return [a for a, _ in pairs], [b for _, b in pairs]


TABLES = st.tuples(*[st.integers(0, 60)] * 4).filter(any)


@settings(derandomize=True, max_examples=300)
@given(TABLES)
@example((0, 0, 1, 0))
@example((0, 60, 0, 0))
def test_paired_difference_as_written_out(table):
    """Bonett and Price's equation, from the four counts."""
    both, lost, gained, neither = table
    n = both + lost + gained + neither
    p12, p21 = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = Z * math.sqrt((p12 + p21 - (p12 - p21) ** 2) / (n + 2))
    before, after = answers(*table)
    difference, (low, high) = paired_difference(before, after)
    assert difference == pytest.approx((sum(after) - sum(before)) / n, abs=1e-12)
    assert (low, high) == pytest.approx((max(-1, p12 - p21 - half), min(1, p12 - p21 + half)), abs=1e-6)
    back, (back_low, back_high) = paired_difference(after, before)
    assert (back, back_low, back_high) == pytest.approx((-difference, -high, -low), abs=1e-12)
    # Whatever says True or 1 is right.
    assert paired_difference([*map(int, before)], list(np.array(after))) == (difference, (low, high))


@pytest.mark.parametrize(
    "shares, count, most",
    [((0.5, 0.06, 0.18, 0.26), 500, 0.965), ((0.2, 0.3, 0.3, 0.2), 40, 0.965), ((0.9, 0.01, 0.04, 0.05), 60, 1)],
)
def test_the_true_difference_is_in_95_percent_of_the_intervals(shares, count, most):
    """Of 2000 samples; 0.5 % is the standard deviation of that share. Where few answers change it is more than that."""
    truth, generator, repeats = shares[2] - shares[1], np.random.default_rng(0), 2000
    inside = 0
    for table in generator.multinomial(count, shares, size=repeats).tolist():
        _, (low, high) = paired_difference(*answers(*table))
        inside += low <= truth <= high
    assert 0.935 < inside / repeats < most


def test_pairs_say_more_than_two_samples():
    before, after = answers(240, 10, 40, 210)
    _, (low, high) = paired_difference(before, after)
    independent = 2 * Z * math.sqrt(sum(p * (1 - p) / 500 for p in (0.5, 0.56)))
    assert low > 0 and high - low < 0.5 * independent
    _, (low, high) = paired_difference([True] * 20, [True] * 20)
    assert low < 0 < high  # 20 answers that stay are no proof that all do


@pytest.mark.parametrize("before, after", [([], []), ([True], [True, False])])
def test_answers_must_come_in_pairs(before, after):
    with pytest.raises(ValueError, match=f"{len(before)} answers before, {len(after)} after"):
        paired_difference(before, after)


# -- a run ------------------------------------------------------------------------------------------------------------


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(*values, kinds=("a", "b")):
    return [
        {"prompt": f"{i}=", "completion": "x", "exact_match": float(value)} | ({"kind": kinds[i % 2]} if kinds else {})
        for i, value in enumerate(values)
    ]


@pytest.fixture
def made(tmp_path):
    """Two policies' answers to four prompts, and logs of three stages."""
    write(tmp_path / "evaluate" / "sft.jsonl", rows_of(1, 0, 0, 0))
    write(tmp_path / "evaluate" / "ppo.jsonl", rows_of(1, 1, 0, 1))
    write(tmp_path / "sft" / "log.jsonl", [{"step": 1, "sft_loss": 2.0, "memory_gb": 0.5}])
    write(tmp_path / "reward" / "log.jsonl", [{"step": 1, "accuracy": 0.5}, {"step": 2, "eval_accuracy": 0.75}])
    first = {"step": 1, "reward": 0.1, "reward_exact_match": 0.2, "kl": 0.0, "wire_inter_mb": 3.0, "memory_gb": 1.0}
    second = {"step": 2, "reward": 0.3, "reward_exact_match": 0.4, "kl": 0.5, "wire_inter_mb": 3.5, "memory_gb": 1.5}
    evaluated = [{"step": 0, "eval_exact_match": 0.25}, {"step": 2, "eval_exact_match": 0.75}]
    write(tmp_path / "ppo" / "log.jsonl", [evaluated[0], first, second, evaluated[1]])
    return tmp_path


POLICIES, STAGES = ["runs/x/sft", "runs/x/ppo"], ["sft", "reward", "ppo"]


def test_summary(made):
    said = summary.summarize(made, POLICIES, "exact_match", STAGES)
    assert list(said) == ["sft", "ppo", "difference", "logs", "curves"]
    assert said["sft"] == {
        "exact_match": 0.25,
        "n_eval": 4,
        "interval": list(wilson_interval(1, 4)),
        "by_kind": {"a": 0.5, "b": 0.0},
    }
    assert (said["ppo"]["exact_match"], said["ppo"]["by_kind"]) == (0.75, {"a": 0.5, "b": 1.0})
    difference, interval = paired_difference([1, 0, 0, 0], [1, 1, 0, 1])
    assert difference == 0.5
    assert said["difference"] == {"of": ["ppo", "sft"], "exact_match": 0.5, "interval": list(interval)}
    assert said["logs"] == {
        "sft": {"memory_gb": 0.5},
        "reward": {"eval_accuracy": 0.75},
        "ppo": {"memory_gb": 1.5, "wire_inter_mb": 3.5},
    }
    assert said["curves"] == {
        "sft": {"sft_loss": [[1, 2.0]]},
        "reward": {"accuracy": [[1, 0.5]], "eval_accuracy": [[2, 0.75]]},
        "ppo": {
            "reward": [[1, 0.1], [2, 0.3]],
            "reward_exact_match": [[1, 0.2], [2, 0.4]],
            "eval_exact_match": [[0, 0.25], [2, 0.75]],
            "kl": [[1, 0.0], [2, 0.5]],
        },
    }
    assert json.loads(json.dumps(said)) == said


def test_summary_of_one_policy_and_of_prompts_without_kinds(made):
    write(made / "evaluate" / "sft.jsonl", rows_of(1, 0, kinds=()))
    said = summary.summarize(made, ["sft"], "exact_match", ["sft"])
    assert list(said) == ["sft", "logs", "curves"] and "by_kind" not in said["sft"]
    assert summary.lines(said, "exact_match") == [
        "sft      exact_match  50.0 %  [9.5, 90.5] of 2 held-out prompts",
    ]
    mixed = [{"exact_match": 1.0, "kind": kind} for kind in (None, 3, "3", "b")]
    assert summary.rates(mixed, "exact_match")["by_kind"] == {"3": 1.0, "b": 1.0}


def test_differences_are_those_of_the_first_and_the_last_policy(made):
    write(made / "evaluate" / "grpo.jsonl", rows_of(0, 0, 0, 1))
    said = summary.summarize(made, ["ppo", "sft", "grpo"], "exact_match", STAGES)
    assert said["difference"]["of"] == ["grpo", "ppo"] and said["difference"]["exact_match"] == -0.5


def test_lines(made):
    said = summary.summarize(made, POLICIES, "exact_match", STAGES) | {"seconds": {"sft": 1.0}, "ranks": 2}
    assert summary.lines(said, "exact_match") == [
        "sft      exact_match  25.0 %  [4.6, 69.9] of 4 held-out prompts",
        "ppo      exact_match  75.0 %  [30.1, 95.4] of 4 held-out prompts",
        "ppo - sft: +50.0 points  [-26.3, +93.0]  (95 % intervals)",
    ]


@pytest.mark.parametrize("value, shown", [(0.5, "0.5"), (float("nan"), "nan"), (2, "2")])
def test_a_metric_that_is_no_yes_or_no(value, shown, made):
    write(made / "evaluate" / "ppo.jsonl", [{"exact_match": 1.0}, {"exact_match": value}])
    with pytest.raises(ValueError, match=f"ppo.jsonl: exact_match is {shown}; intervals are those of a metric of 0 an"):
        summary.summarize(made, POLICIES, "exact_match", STAGES)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig

    def saved(figure, *args, **more):
        figures.append(figure)
        save(figure, *args, **more)

    monkeypatch.setattr(Figure, "savefig", saved)
    return figures


def panels_in(figure):
    return {axes.get_title(): axes for axes in figure.axes}


def test_picture(made, drawn, tmp_path):
    said = summary.summarize(made, POLICIES, "exact_match", STAGES)
    summary.draw(said, "exact_match", tmp_path / "summary.png", "some model, recipe zeropp")
    assert (tmp_path / "summary.png").read_bytes().startswith(b"\x89PNG")
    panels = panels_in(drawn[0])
    assert list(panels) == [
        "ppo: score, the weighted sum of rewards",
        "ppo: exact answers",
        "ppo: KL to the reference",
        "exact answers, 4 held-out prompts, greedy",
        "by kind of task",
    ]
    curves = {line.get_label(): line.get_xydata().tolist() for line in panels["ppo: exact answers"].lines}
    assert curves == {"samples": [[1, 20], [2, 40]], "held out, greedy": [[0, 25], [2, 75]]}
    score = panels["ppo: score, the weighted sum of rewards"]
    assert panels["ppo: exact answers"].get_legend() is not None and score.get_legend() is None
    assert (score.get_xlabel(), score.get_ylabel()) == ("iteration", "points per response")
    units = [panels[f"ppo: {title}"].get_ylabel() for title in ("exact answers", "KL to the reference")]
    assert units == ["% of responses", "nats per response"]
    bars = panels["exact answers, 4 held-out prompts, greedy"]
    assert [bar.get_height() for bar in bars.patches] == [25, 75]
    (low, high), _ = (segment[:, 1] for segment in bars.collections[0].get_segments())
    assert (low, high) == pytest.approx([100 * end for end in wilson_interval(1, 4)])
    by_kind = panels["by kind of task"]
    assert [bar.get_width() for bar in by_kind.patches] == [50, 0, 50, 100]
    assert [label.get_text() for label in by_kind.get_yticklabels()] == ["a", "b"]
    assert drawn[0].get_suptitle().startswith("some model, recipe zeropp\nppo - sft: +50.0 points")


def test_what_a_score_is():
    functions = {"reward_functions": ["exact_match", "mine.py:short"], "reward_weights": [1.0, 0.0]}
    told = functions | {"reward_model": "out/reward", "reward_model_weight": 0.25, "missing_eos_penalty": 0.5}
    short = " + 1 x exact answers + 0 x mine.py:short"
    assert summary.score_of(told, 1.0, 0.0) == f"score = 0.25 x reward model{short} - 0.5 where a response does not end"
    assert summary.score_of(functions, 1.0, 0.0) == f"score = {short[3:]}"
    assert summary.score_of(functions | {"reward_model": "r"}, 1.0, 0.0) == f"score = 1 x reward model{short}"


def test_picture_of_a_run_that_ends_with_sft(made, drawn, tmp_path):
    """One policy, no kinds, and a log that has nothing else to show."""
    write(made / "evaluate" / "sft.jsonl", rows_of(1, 0, kinds=()))
    said = summary.summarize(made, ["sft"], "exact_match", ["sft"])
    summary.draw(said, "exact_match", tmp_path / "one.png", "")
    summary.draw(said | {"curves": {"sft": {}}}, "exact_match", tmp_path / "none.png", "")
    assert list(panels_in(drawn[0])) == ["sft: SFT loss", "exact answers, 2 held-out prompts, greedy"]
    assert panels_in(drawn[0])["sft: SFT loss"].get_xlabel() == "step"
    assert list(panels_in(drawn[1])) == ["exact answers, 2 held-out prompts, greedy"]


# -- evaluate.py ------------------------------------------------------------------------------------------------------


def test_policies_are_named_by_their_folders():
    assert evaluate.names_of(["runs/sft/", "runs/x/ppo", "someone/model"]) == ["sft", "ppo", "model"]
    with pytest.raises(ValueError, match="--models a/ppo b/ppo: their last names must differ, because files are named"):
        evaluate.names_of(["a/ppo", "b/ppo"])


def test_options_of_each_policy():
    given = EvaluationArguments(
        models=["a", "b"],
        out="o",
        deepspeed_config="c",
        data=["d"],
        reward_functions=["gsm8k"],
        max_new_tokens=7,
        max_prompt_tokens=9,
        eval_batch=3,
        chat=True,
        bad_rows="refuse",
        lora_rank=0,
    )
    of_b = given.of("b")
    assert of_b.model == "b" and (of_b.max_new_tokens, of_b.max_prompt_tokens, of_b.eval_batch) == (7, 9, 3)
    assert of_b.chat and of_b.bad_rows == "refuse" and of_b.lora_rank == 0 and of_b.reward_functions == ["gsm8k"]
