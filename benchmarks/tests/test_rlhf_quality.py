"""benchmarks/rlhf_quality.py: intervals over seeds, and what is said of a recipe beside bf16."""

import math

import pytest
import torch

from benchmarks import rlhf_quality as quality


@pytest.mark.parametrize("degrees", range(1, 10))
def test_quantiles_of_students_t(degrees):
    """The density, integrated from -T to T in float64, is 95 %."""
    x = torch.linspace(0, quality.T_95[degrees - 1], 200_001, dtype=torch.float64)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    density = scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    assert 2 * torch.trapezoid(density, x).item() == pytest.approx(0.95, abs=3e-5)


def test_interval():
    # Mean 4, standard deviation 2, so 2 / sqrt(3) of the mean; 4.303 of these with 2 degrees of freedom.
    assert quality.interval([2.0, 4.0, 6.0]) == pytest.approx((4 - 4.96868, 4 + 4.96868), abs=1e-4)
    for count in (1, 11):
        with pytest.raises(ValueError, match=f"an interval of {count} runs: give 2 to 10 seeds"):
            quality.interval([0.5] * count)


def rows(recipe, values):
    return [{"recipe": recipe, "seed": i, "sft": 0.5, "ppo": v, "grpo": v + 0.1} for i, v in enumerate(values)]


def test_recipes_are_compared_with_bf16(capsys):
    lines = quality.compare(rows("fp8-lm", [0.61, 0.63]) + rows("stock", [0.6, 0.62]) + rows("zeropp", [0.9, 0.92]))
    assert [(line["recipe"], line["policy"]) for line in lines[::3]] == [
        ("stock", "sft"), ("fp8-lm", "sft"), ("zeropp", "sft"),
    ]  # fmt: skip
    by_name = {(line["recipe"], line["policy"]): line for line in lines}
    bf16 = by_name["stock", "ppo"]
    assert bf16["mean"] == pytest.approx(0.61) and bf16["gain"] == pytest.approx(0.11)
    assert bf16["interval"] == pytest.approx([0.61 - 0.12706, 0.61 + 0.12706], abs=1e-5) and "within_bf16" not in bf16
    assert by_name["fp8-lm", "ppo"]["within_bf16"] and not by_name["zeropp", "ppo"]["within_bf16"]
    assert "gain" not in by_name["fp8-lm", "sft"]
    quality.show(lines)
    text = capsys.readouterr().out
    assert text.count("OUTSIDE bf16's") == 2 and text.count("within bf16's") == 4  # sft is the same for all
    assert "62.0 %" in text and "+12.0" in text


def test_one_seed_has_no_interval():
    assert all("interval" not in line for line in quality.compare(rows("stock", [0.6]) + rows("fp8-lm", [0.7])))


def test_settings_of_a_pipeline(tmp_path):
    """Several ranks share a rollout and a batch, so that a step sees as many rows as one rank's."""
    args = quality.parse(["--size", "base", "--ranks", "2", "--iterations", "8"])
    made = quality.json.loads(quality.settings_of(args, tmp_path).read_text())
    assert made["ppo"]["iterations"] == made["grpo"]["iterations"] == 8 and made["ppo"]["eval_every"] == 2
    assert made["ppo"]["rollout_batch"] == 256 and made["ds_config"]["train_micro_batch_size_per_gpu"] == 64
    assert quality.SETTINGS["base"]["ppo"]["rollout_batch"] == 512 and made["grpo"]["rollout_batch"] == 256


def test_a_run_that_fails_is_told(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)exit status \d; the log ends with.*--out"):
        quality.pipeline(["--nonsense"], tmp_path / "log", float("inf"))


def test_refusals(capsys):
    with pytest.raises(SystemExit):
        quality.parse(["--recipes", "stock,nonsense"])
    assert "there is no ds_configs/nonsense.json" in capsys.readouterr().err
    for name in ("--iterations", "--seeds", "--ranks", "--side-by-side", "--timeout"):
        with pytest.raises(SystemExit) as stopped:
            quality.parse([name, "0"])
        assert stopped.value.code == 2 and f"argument {name}: 0: give a " in capsys.readouterr().err


def test_curves_of_logs():
    log = [{"step": 1, "kl": 0.12347}, {"step": 2, "entropy": 1.0}, {"step": 3, "kl": 0.5}]
    assert quality.curve(log, "kl") == [[1, 3], [0.1235, 0.5]]
