"""torch.compile: `"compile": "blocks"`, `layer.compile()` and `engine.compile()` compute what eager code does."""

import shutil

import compile_jobs as jobs
import pytest
import torch
from ranks import run_ranks, run_two
from running import same

BLOCKS, LAYERS, ALL = jobs.WAYS[:2], jobs.WAYS[:3], jobs.WAYS
WHOLE = (*BLOCKS, "engine.compile")
FP8 = {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}
OPERANDS = {"compute": FP8, "weights": {"format": "fp8_e4m3"}}
# Most of the time goes into tracing. By AOTAutograd, and for evaluation too: each way once, and what has operators of
# the plugin; others as Dynamo traces them for training.
TRACED = {"backend": "eager", "evaluations": 0}
CASES = {
    "zeropp": {"recipe": "zeropp", "ways": ALL},
    "lossless": {"recipe": "lossless", "ways": BLOCKS, **TRACED},
    "reentrant": {"recipe": "zeropp", "checkpointing": "reentrant", "ways": BLOCKS},
    "non-reentrant": {"recipe": "zeropp", "checkpointing": "non-reentrant", "ways": LAYERS, **TRACED},
    "LoRA": {"recipe": "zeropp", "lora": True, "ways": WHOLE, **TRACED},
    "qlora": {"recipe": "qlora", "lora": True, "ways": BLOCKS},
    "accumulation": {"recipe": "zeropp", "gradient_accumulation_steps": 2, "ways": BLOCKS, **TRACED},
    "mxfp8": {"recipe": "mxfp8", "ways": WHOLE},
    "fp8-lm": {"recipe": "fp8-lm", "ways": BLOCKS},
    "delayed": {"recipe": "zeropp", "fields": {"compute": {**FP8, "scaling": "delayed"}}, "ways": BLOCKS},
    "operands": {"recipe": "zeropp", "fields": OPERANDS, "ways": WHOLE},
    "operands, reentrant": {"recipe": "zeropp", "fields": OPERANDS, "checkpointing": "reentrant", "ways": BLOCKS},
}
OPAQUE = ("qlora",)  # its layers are called by graphs, and not traced


@pytest.fixture(scope="module")
def found():
    """By case and way."""
    return dict(zip(CASES, run_two(jobs.each_way, cases=list(CASES.values()))[0]))


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_eager(found, case):
    eager, _ = found[case]["eager"]
    for way, (trace, forwards) in found[case].items():
        if case == "fp8-lm":  # between its layers gradients are added in another order, and FP8 may then round apart
            assert trace.losses == pytest.approx(eager.losses, rel=1e-4), way
        else:
            assert trace.losses == eager.losses, way
        for name, weight in eager.masters.items():
            difference = (trace.masters[name] - weight).norm() / weight.norm()
            assert difference <= (1e-3 if case == "fp8-lm" else 0.0), (way, name)
        assert forwards == 0, "destroy() gives every block its own forward back"


@pytest.mark.parametrize("case", CASES)
def test_what_is_traced(found, case):
    """Nothing after the first step, and after the first evaluation; of blocks one graph for all, without a break."""
    assert found[case]["eager"][0].seen[-1] == (0, 0)
    evaluated = CASES[case].get("evaluations", 2) > 0
    for way, (trace, _) in found[case].items():
        traced = trace.seen
        assert traced[0] == traced[jobs.STEPS - 1], way
        assert not evaluated or traced[jobs.STEPS] == traced[-1], way
        if way in ("blocks", "layer.compile") and case not in OPAQUE:
            assert traced[0] == (1, 0) and traced[-1][1] == 0, (way, traced)
        elif way != "eager":
            assert traced[0][0] + traced[0][1] > 0, way


SAMPLED = {case: CASES[case] for case in ("zeropp", "delayed", "operands")}


@pytest.fixture(scope="module")
def sampled(found, tmp_path_factory):
    """By case and way: without samples, with them, and the samples."""
    runs = run_two(jobs.sampled, folder=str(tmp_path_factory.mktemp("samples")), cases=SAMPLED)[0]
    return {(case, way): (found[case][way][0], *run) for (case, way), run in runs.items()}


@pytest.mark.parametrize("case", SAMPLED)
def test_samples_of_what_is_compiled(sampled, case):
    """The numbers of eager code, of training that is bitwise what it is without samples."""
    eager = sampled[case, "eager"][2]
    assert len(eager) == 2
    for way in SAMPLED[case]["ways"]:
        plain, watched, samples = sampled[case, way]
        assert watched.losses == plain.losses[: jobs.STEPS] and same(watched.masters, plain.masters), way
        for rows, of_eager in zip(samples, eager, strict=True):
            assert [(row["kind"], row["layer"]) for row in rows] == [(row["kind"], row["layer"]) for row in of_eager]
            for row, expected in zip(rows, of_eager):
                assert row["snr_db"] == pytest.approx(expected["snr_db"], abs=0.01), (way, row)
                assert row["amax"] == pytest.approx(expected["amax"], rel=1e-4), (way, row)


@pytest.mark.parametrize("case", SAMPLED)
def test_samples_trace_nothing(sampled, case):
    """Of blocks the same one graph as without them, in steps with a sample too."""
    for way in SAMPLED[case]["ways"]:
        plain, watched, _ = sampled[case, way]
        assert watched.seen == plain.seen[: jobs.STEPS], way
        assert plain.seen[0] == plain.seen[jobs.STEPS - 1], way


def test_of_gathered_values_nothing_is_saved():
    for eager, compiled in run_two(jobs.saved_tensors, recipe="zeropp", ways=BLOCKS):
        assert compiled == eager and eager[0] >= 20 and not eager[1]


def test_generation():
    """The tokens of eager code from graphs outside of the context, and from none inside; training goes on compiled."""
    for found in run_two(jobs.generated):
        for (recipe, way), (said, inside, loss, behind) in found.items():
            eager = found[recipe, "eager"]
            assert all(torch.equal(tokens, eager[0][0]) for tokens in said) and loss == eager[2], (recipe, way)
            assert inside == (0, 0) and (way == "eager" or sum(behind) > 0), (recipe, way, inside, behind)


def test_copies_and_wrappers():
    assert run_ranks(jobs.copies, world=1, ranks_per_node=1)[0] == {"same": True, "copy": True, "undone": True}


def test_a_model_without_blocks():
    message = run_two(jobs.refusals)[0]
    assert '"zeropp_fp8.compile" is "blocks"' in message and 'set it to "none"' in message


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile's CPU kernels need g++")
def test_the_default_backend(found):
    """Inductor fuses operations and so rounds less often in 16 bits; fp32 keeps 5 digits."""
    compiled, _ = run_two(jobs.train, recipe="zeropp", way="blocks", backend="inductor")[0]
    assert compiled.losses == pytest.approx(found["zeropp"]["eager"][0].losses, rel=1e-5)
    assert compiled.seen[0] == (1, 0) and compiled.seen[jobs.STEPS - 1] == (1, 0)
