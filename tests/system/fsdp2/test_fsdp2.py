"""The collectives under fully_shard, on gloo: beside stock FSDP2, and what they promise under ZeRO-3 too."""

import functools
import os
import re
import subprocess
import sys

import fsdp2_jobs as jobs
import pytest
import torch
from hang_guard import HANG
from ranks import run_ranks, run_two
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.places import ROOT

BF16 = {"policy": jobs.BF16}
NODES = [1, 2, 4]  # ranks of each, of four


@pytest.mark.parametrize("make, how", [(jobs.llama, {}), (jobs.llama, BF16), (jobs.odd, {})], ids=["", "bf16", "odd"])
@pytest.mark.parametrize("ranks_per_node", NODES)
def test_lossless_is_stock_bit_for_bit(make, how, ranks_per_node):
    for runs in run_ranks(jobs.beside_stock, ranks_per_node=ranks_per_node, recipes=["lossless"], make=make, **how):
        (losses, weights, _), (stock, theirs, _) = runs["lossless"], runs[None]
        assert losses == stock
        assert all(torch.equal(weight, theirs[name]) for name, weight in weights.items())


@pytest.mark.parametrize(
    "make, how, recipes",
    [
        (jobs.llama, {}, ["zeropp", "zeropp-4bit"]),
        (jobs.llama, BF16, ["zeropp", "zeropp-exact"]),
        (jobs.odd, BF16, ["zeropp", "zeropp-4bit"]),
    ],
    ids=["", "bf16", "odd"],
)
@pytest.mark.parametrize("ranks_per_node", NODES)
def test_recipes_train_like_stock(make, how, recipes, ranks_per_node):
    """In few bits, and with nothing between nodes in backward but gradients."""
    runs = run_ranks(jobs.beside_stock, ranks_per_node=ranks_per_node, recipes=recipes, make=make, **how)
    for recipe in recipes:
        for found in runs:
            losses, _, sent = found[recipe]
            assert losses == pytest.approx(found[None][0], rel=1e-2)
            assert sent["weights_backward"]["inter"] == 0
            assert (sent["weights_forward"]["inter"] > 0) == (ranks_per_node < 4)
            assert (sent["gradients"]["inter"] > 0) == (ranks_per_node < 4)


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_ranks(world):
    for found in run_ranks(jobs.beside_stock, world=world, ranks_per_node=1, recipes=["zeropp"], make=jobs.odd):
        assert found["zeropp"][0] == pytest.approx(found[None][0], rel=1e-2)


@pytest.mark.parametrize("policy, recipe", [(None, "zeropp"), (jobs.BF16, "zeropp"), (jobs.BF16, "zeropp-exact")])
def test_differences_change_no_bit(policy, recipe):
    for whole, differences in run_ranks(jobs.whole_and_differences, policy=policy, recipe=recipe):
        assert whole[0] == differences[0]
        assert all(torch.equal(weight, whole[1][name]) for name, weight in differences[1].items())


def test_nodes_keep_copies_until_weights_change():
    """Copies are used once more, and dropped wherever weights are written: losses are those without copies."""
    for seen in run_ranks(jobs.copies):
        sent = [now - before for (_, before, _), (_, now, _) in zip([("", 0, None), *seen], seen)]
        assert {what: number > 0 for (what, *_), number in zip(seen, sent)} == {
            "first": True,
            "again": False,
            "written in place": True,
            "told": True,
            "loaded": True,
            "into a state dict": True,
            "looked at by one rank": False,
        }
        assert all(ours == plain for _, _, (ours, plain) in seen)
        assert len({losses[0] for _, _, losses in seen}) == 5


def test_weights_replaced_for_an_evaluation():
    for copies, plain in run_two(jobs.averages):
        assert copies == plain


@pytest.mark.parametrize("how", ["sync", "last", None])
@pytest.mark.parametrize("ranks_per_node", NODES)
def test_micro_batches(ranks_per_node, how):
    """Gradients are stock's within the bounds of their codes; with a last one said, they cross between nodes once."""
    nodes = {"ranks_per_node": ranks_per_node}
    stock = run_ranks(jobs.accumulated, recipe=None, how=how, **nodes)[0][0]
    once = run_ranks(jobs.accumulated, recipe="zeropp", how="sync", **nodes)[0][1]
    for grads, between in run_ranks(jobs.accumulated, recipe="zeropp", how=how, **nodes):
        assert between == once * (3 if how is None else 1)
        assert_close(grads, stock)


def test_micro_batches_that_are_cut_short():
    """No gradient is lost without a word: not by another optimizer's step, and not by a step that comes too early."""
    for found in run_two(jobs.micro_batches_cut_short):
        for one, other in (("both", "another optimizer"), ("second", "dropped")):
            assert all(torch.equal(grad, found[other][name]) for name, grad in found[one].items()), other
        assert any(not torch.equal(grad, found["second"][name]) for name, grad in found["both"].items())
        assert "were written between micro-batches" in found["zeros"] and "zero_grad() as it is" in found["zeros"]
        for which in ("no last", "left out"):
            assert "are still inside the node: say set_is_last_backward(True)" in found[which], which
        assert found["given up, and skipped"] == "nothing raised"


@pytest.mark.parametrize("on", [None, "copies"])
def test_parameters_that_are_frozen_between_steps(on):
    """Sums of micro-batches are of what is trained then; a change between two micro-batches is an error."""
    stock = run_ranks(jobs.unfrozen_between_steps, recipe=None, on=on)[0][0]
    for found, said in run_ranks(jobs.unfrozen_between_steps, recipe="zeropp", on=on):
        for grads, theirs in zip(found, stock):
            assert_close(grads, theirs)
        assert ("have not been sent to other copies" if on else "are still inside the node") in said


def test_parameters_that_were_loaded_after_sharding():
    for stock, lossless, zeropp in run_two(jobs.loaded_anew):
        assert lossless == stock and zeropp == pytest.approx(stock, rel=1e-2)


def test_offloaded_parameters():
    for found in run_ranks(jobs.beside_stock, recipes=["lossless", "zeropp"], **jobs.OFFLOADED):
        (losses, weights, _), (stock, theirs, _) = found["lossless"], found[None]
        assert losses == stock and all(torch.equal(weight, theirs[name]) for name, weight in weights.items())
        assert found["zeropp"][0] == pytest.approx(stock, rel=1e-2)


def test_blocks_alone_inside_of_a_wrapper():
    for stock, lossless, zeropp in run_two(jobs.in_a_wrapper):
        assert lossless == stock and zeropp == pytest.approx(stock, rel=1e-2)


def assert_close(grads, stock, names=None):
    """Within the error of two hops, of 8 and of 4 bits; vectors are sent exactly."""
    assert grads.keys() == stock.keys()
    for name, grad in grads.items():
        bound = 1e-5 if grad.dim() < 2 else 0.2
        assert (grad - stock[name]).norm() <= bound * stock[name].norm() + 1e-12, name
    assert any(not torch.equal(grad, stock[name]) for name, grad in grads.items() if grad.dim() > 1)


@pytest.mark.parametrize(
    "change, factor", [(functools.partial(jobs.divided_by, 8.0), 0.5), (jobs.summed, 1.0)], ids=["divided", "summed"]
)
def test_what_gradients_are_divided_by(change, factor):
    for grads, stock in run_ranks(jobs.gradients_beside_stock, change=change, factor=factor):
        assert_close(grads, stock)


def test_parameters_without_gradients():
    """A block that is skipped leaves gradients of the others, which are sent in full if they share its module."""
    for grads, stock in run_ranks(jobs.gradients_beside_stock, skip=(1,), make=jobs.odd):
        assert_close(grads, stock)


def test_frozen_parameters():
    for found in run_two(jobs.beside_stock, recipes=["zeropp"], adapt=jobs.freeze):
        (losses, weights, _), (stock, theirs, _) = found["zeropp"], found[None]
        assert losses == pytest.approx(stock, rel=1e-2)
        assert all(torch.equal(weights[name], theirs[name]) for name in weights if "mlp" not in name)


@pytest.mark.parametrize("make, how", [(jobs.llama, {}), (jobs.llama, BF16), (jobs.odd, {})], ids=["", "bf16", "odd"])
def test_a_copy_in_each_node(make, how):
    """Beside torch's HSDP: the same bits where nothing is rounded, and 4 bits for 32 between two copies."""
    stock = run_ranks(jobs.replicated, recipe=None, make=make, **how)
    exact = run_ranks(jobs.replicated, recipe="lossless", make=make, **how)
    rounded = run_ranks(jobs.replicated, recipe="zeropp", make=make, **how)
    for (losses, weights, *_), (same, theirs, sent, as_stock), (close, ours, less, _) in zip(stock, exact, rounded):
        padded = 1e-9 if make is jobs.llama else 0.005  # payloads of odd sizes are aligned
        assert sent * 16 == pytest.approx(as_stock * 32, rel=padded)  # stock's are counted in 16 bits
        assert losses == same and all(torch.equal(weight, theirs[name]) for name, weight in weights.items())
        assert close == pytest.approx(losses, rel=1e-2) and close != losses
        assert all(torch.equal(weight, rounded[0][1][name]) for name, weight in ours.items())  # on every copy
        assert less < (4.5 if make is jobs.llama else 6) / 32 * sent  # gradients are summed in fp32


def test_gradients_of_two_copies_are_rounded_once():
    for grads, expected in run_two(jobs.rounded_once):
        for name, grad in grads.items():
            assert torch.allclose(grad, expected[name], rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize("make", [jobs.llama, jobs.odd])
def test_more_copies_than_two(make):
    """Each rank sends its share of the mean in 8 bits, after codes of 4: 3/4 of 12.3 bits, where stock sends 24."""
    exact, rounded = (
        run_ranks(jobs.replicated, ranks_per_node=1, recipe=recipe, make=make, copies=4)
        for recipe in ("lossless", "zeropp")
    )
    stock = run_ranks(jobs.replicated, ranks_per_node=1, recipe=None, make=make, copies=4)
    for (losses, *_), (same, *_), (close, weights, sent, as_stock) in zip(stock, exact, rounded):
        assert losses == pytest.approx(same, rel=1e-5)
        assert close == pytest.approx(losses, rel=1e-2) and close != losses
        assert all(torch.equal(weight, rounded[0][1][name]) for name, weight in weights.items())
        assert sent / as_stock == pytest.approx(12.3 / 32, rel=0.03 if make is jobs.llama else 0.3)


@pytest.mark.parametrize("copies", [2, 4])
def test_a_copy_in_each_node_with_error_feedback(copies):
    how = {"ranks_per_node": 4 // copies, "copies": copies}
    fields = {"gradients": {"error_feedback": True}}
    for (losses, *_), (stock, *_) in zip(
        run_ranks(jobs.replicated, recipe="zeropp", fields=fields, **how),
        run_ranks(jobs.replicated, recipe=None, **how),
    ):
        assert losses == pytest.approx(stock, rel=1e-2)


def test_residuals_where_gradients_take_another_way_between_copies():
    for stock, losses in run_ranks(jobs.residuals_of_three_copies, world=3, ranks_per_node=1):
        assert losses == pytest.approx(stock, rel=1e-2)


def test_a_copy_in_each_node_without_some_gradients():
    for (losses, *_), (stock, *_) in zip(
        run_ranks(jobs.replicated, recipe="zeropp", make=jobs.odd, skip=(1,)),
        run_ranks(jobs.replicated, recipe=None, make=jobs.odd, skip=(1,)),
    ):
        assert losses == pytest.approx(stock, rel=1e-2)


@pytest.mark.parametrize("how", ["sync", "copies", "last", None])
@pytest.mark.parametrize("recipe", ["lossless", "zeropp"])
def test_micro_batches_on_copies(recipe, how):
    stock = run_ranks(jobs.replicated_micro_batches, recipe=None, how=None)[0][0]
    once = run_ranks(jobs.replicated_micro_batches, recipe=recipe, how="sync")[0][1]
    for grads, sent, early in run_ranks(jobs.replicated_micro_batches, recipe=recipe, how=how):
        assert sent == once * (3 if how is None else 1)
        assert how != "copies" or "have not been sent to other copies" in early
        if recipe == "zeropp":
            assert_close(grads, stock)
        else:
            assert all(torch.allclose(grad, stock[name], rtol=1e-4, atol=1e-7) for name, grad in grads.items())


@pytest.mark.parametrize("how", ["copies", "last"])
def test_micro_batches_on_copies_that_leave_parameters_out(how):
    """None is lost, though what they leave out has no gradient."""
    stock = run_ranks(jobs.replicated_micro_batches, recipe=None, how=None, make=jobs.odd)[0][0]
    for grads, *_ in run_ranks(jobs.replicated_micro_batches, recipe="lossless", how=how, make=jobs.odd):
        assert grads.keys() == stock.keys() and len(grads) < 11
        assert all(torch.allclose(grad, stock[name], rtol=1e-4, atol=1e-7) for name, grad in grads.items())


def test_what_gradients_of_copies_are_divided_by():
    change = functools.partial(jobs.divided_by, 8.0)
    stock = run_ranks(jobs.replicated_micro_batches, recipe=None, how=None)[0][0]
    for grads, *_ in run_ranks(jobs.replicated_micro_batches, recipe="zeropp", how=None, change=change):
        assert_close(grads, {name: 0.5 * grad for name, grad in stock.items()})


def test_parameters_of_two_dtypes():
    for stock, lossless, zeropp in run_two(jobs.two_dtypes):
        assert lossless[0] == stock[0] and zeropp[0] == pytest.approx(stock[0], rel=1e-2)
        assert all(torch.equal(weight, stock[1][name]) for name, weight in lossless[1].items())


def test_ways_to_shard_are_the_same_numbers():
    for found in run_two(jobs.ways):
        losses, weights = found["plain"]
        for name, (others, theirs) in found.items():
            assert others == losses, name
            assert all(torch.equal(weight, weights[key]) for key, weight in theirs.items()), name


@pytest.mark.parametrize(
    "recipe, error_feedback, copies",
    [("zeropp", False, 1), ("zeropp-4bit", True, 1), ("zeropp", True, 2), ("zeropp-4bit", True, 4)],
)
def test_checkpoints_of_torch(recipe, error_feedback, copies):
    """Each copy of the model has residuals of its own."""
    how = {"fields": {"gradients": {"error_feedback": True}} if error_feedback else {}, "copies": copies}
    nodes = {"ranks_per_node": 2 if copies == 1 else 4 // copies}
    for (losses, weights), (again, theirs) in run_ranks(jobs.resumed, recipe=recipe, **how, **nodes):
        assert losses == again
        assert all(torch.equal(weight, theirs[name]) for name, weight in weights.items())


@pytest.mark.parametrize("recipe, policy", [("zeropp", None), ("zeropp-exact", jobs.BF16), ("zeropp-4bit", None)])
def test_training_goes_on_after_inference_mode(recipe, policy):
    plain, inference = (
        run_two(jobs.evaluated_between_steps, recipe=recipe, policy=policy, context=context)
        for context in (torch.no_grad, torch.inference_mode)
    )
    assert plain == inference


@pytest.mark.parametrize("recipe, policy", [("zeropp", None), ("zeropp-exact", jobs.BF16), ("zeropp-4bit", None)])
def test_one_rank_alone_writes_its_part_after_a_step(recipe, policy):
    for losses, stock in run_two(jobs.written_by_one_rank, recipe=recipe, policy=policy):
        assert losses == pytest.approx(stock, rel=1e-2)


@pytest.mark.parametrize("wrap", [None, checkpoint_wrapper, functools.partial(torch.compile, backend="eager")])
def test_name_patterns_do_not_depend_on_wrappers(wrap):
    for rank, (sent, text) in enumerate(run_two(jobs.left_exact, wrap=wrap)):
        assert sent["layers.0.mlp"] > 1.1 * sent["nowhere"]
        assert text.count("skip_modules names nothing of this model by nowhere") == (rank == 0)


def test_steps_after_loading():
    """torch.distributed.checkpoint makes an empty step of the optimizer, so that there are states to load into."""
    assert run_two(jobs.steps_after_loading) == [[0, 2]] * 2
    assert run_ranks(jobs.steps_after_loading, world=1, ranks_per_node=1) == [[1, 3]]  # one rank sends nothing


def test_modules_that_are_sharded_as_a_list():
    numel, table = run_two(jobs.in_a_list)[0]
    assert f" {numel} " in table and "2 modules" in table


def test_refusals():
    for rank, said in enumerate(run_ranks(jobs.refused)):
        assert said["copies print once"].count("over copies") == (rank == 0)
        assert "call torch's fully_shard on the model first" in said["not sharded"]
        assert "SimpleFSDP" in said["not sharded"] and "set_symm_mem_for_comm" in said["symmetric memory"]
        assert "when all gather comm is custom" in said["later"], "torch itself refuses it after apply()"
        assert "apply() was called on this model before" in said["twice"]
        assert "give fully_shard a mesh of one dimension" in said["HSDP"]
        assert all("replicate must be a mesh of one dimension" in said[each] for each in ("copies", "same copy"))
        several = said["several groups"]  # before torch 2.13 a module has one group
        assert "groups of parameters over several meshes" in several or "ShardPlacementResult" in several
        for recipe in ("recipe", "no nodes"):
            assert "is of ZeRO-3, or misspelt" in said[recipe] and "zeropp-4bit, zeropp-exact" in said[recipe]
        assert '"zeropp_fp8.gradients.accumulate_in" is of ZeRO-3' in said["added elsewhere"] and said["off"] is True
        assert '"zeropp_fp8.gradients.error_feedback": residuals of fp16 gradients' in said["fp16"]
        assert '"zeropp_fp8.numerics" is of ZeRO-3' in said["field"]
        assert "wheights" in said["unknown"] and "did you mean" in said["unknown"]
        assert "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in said["exact in 32 bits"]
        assert "ranks_per_node" in said["nodes"]
        assert "parameters in torch.uint8 would be gathered" in said["codes"] and "ignored_params" in said["codes"]
        assert "bring a gather of their own" in said["gathers itself"]
        assert "call apply() on this model first" in said["not applied"]
        assert '"reshard_after_forward" as true or false' in said["fewer ranks"]


def test_start_table_and_progress():
    text = run_ranks(jobs.table)[0]
    assert "recipe zeropp; 2 node(s) x 2 rank(s)" in text
    for line in ("weights ", "gradients within nodes", "gradients between nodes", "secondary shard", "gather unit"):
        assert f"\n  {line}" in text
    assert "zeropp_fp8: step 4: a rank sends" in text


def test_a_model_that_is_dropped_takes_all_with_it():
    for is_gone, hooks in run_two(jobs.collected):
        assert is_gone and hooks == 0


def printed_by(script, *more):
    """The output of an example: four steps on two nodes of one rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples" / "pretrain" / script), "--ranks-per-node", "1", "--steps", "4", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_trainer_on_a_model_that_transformers_shards(tmp_path):
    done = printed_by("fsdp2_trainer.py", "--folder", str(tmp_path))
    losses = [float(found) for found in re.findall(r"'loss': '?([\d.]+)", done.stdout + done.stderr)]
    assert len(losses) in (4, 8) and losses[-1] < losses[0] - 0.3
    assert "weights_backward: 0 bytes between nodes, 0 within" in done.stdout


def test_the_example():
    done = printed_by("fsdp2.py")
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.3
    assert "weights_backward: 0 bytes between nodes, 0 within" in done.stdout


def test_deepspeed_is_not_needed():
    code = "import sys; sys.modules['deepspeed'] = None; import zeropp_fp8.fsdp2"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG)
