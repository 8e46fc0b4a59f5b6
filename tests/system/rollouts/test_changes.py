"""Elements that have changed: exactly those come, whatever happens to an engine; and what fails."""

import changes_jobs as jobs
from ranks import run_two

_FP8 = {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}
CHANGED = {
    "slices": ("zeropp", "none", "bf16", "none", {}),
    "in fp32": ("lossless", "none", "fp32", "none", {}),
    "differences": ("zeropp-exact", "none", "bf16", "none", {}),
    "owners": ("fp8-lm", "none", "bf16", "none", {"compute": _FP8}),
    "codes of owners": ("fp8-lm", "none", "bf16", "fp8", {"compute": {**_FP8, "scaling": "delayed"}}),
    "codes": ("zeropp", "none", "bf16", "fp8", {}),
    "LoRA": ("zeropp", "lora", "bf16", "none", {}),
    "LoRA on NF4": ("qlora", "lora", "bf16", "none", {}),
}


def test_elements_that_have_changed():
    """On rank 0 all at first, then exactly those whose bits differ; all again after any rank has forgotten."""
    (first, second) = run_two(jobs.what_has_changed, cases=CHANGED)
    for case, (rounds, _, numel) in first.items():
        assert [said for said, _, _ in rounds] == [(True, True)] * 5, case
        sent = [sent for _, sent, _ in rounds]
        assert sent[0] == sent[4] >= sent[2] > sent[1] == 0 and sent[3] == numel, (case, sent)
        assert [version for _, _, version in rounds] == [1, 2, 3, 5, 6]
    for case, (rounds, outside, _) in second.items():
        assert all(said == (True, True) and not sent for said, sent, _ in rounds), case
        if case in ("slices", "in fp32", "differences", "owners"):
            assert outside == 0, "nothing is gathered, and nothing has changed"


def test_changes_that_fail():
    """Every rank says so, and all goes next; what cannot be had is refused."""
    failed = "RuntimeError: comparing weights with what was handed over failed on rank"
    for rank, said in enumerate(run_two(jobs.changes_that_fail)):
        early = f"{failed} 0: RuntimeError: the iteration was ended before the last tensor"
        assert said["stopped"] == (early if rank else "OSError: the engine is gone") and said["again"] == (True, True)
        assert said["failing"] == f"{failed} 1: MemoryError: no room to compare"
        assert said["then"] == (True, True)
        assert said["adapters"].startswith("ValueError: Changes: adapters are small; iterate over their WeightSource")
        assert said["large"].endswith("elements; places of changes are below 1000")


def test_nothing_that_has_changed_is_left_out():
    """Whatever a tensor is made of; and layers that share a weight go as they are, which an engine is told."""
    first, second = run_two(jobs.kept_up_to_date)
    assert all(came for _, came in (of for case, of in first.items() if case not in ("said", "codes of tied")))
    for found in (first, second):
        said = found.pop("said")
        assert said.startswith("RuntimeError: WeightSource: its engine was destroyed"), said
        names, ignored = found.pop("codes of tied")
        assert ignored == ["first", "again"] and "first.weight_scale" not in names and "last.weight_scale" in names
        assert len(found) == 5
        for case, (said, _) in found.items():
            assert said == (True, True), case


CHOICES = {
    "merged": ("lora", True, {}, 0),
    "codes": ("lora", False, {"format": "fp8"}, 0),
    "frozen": ("none", False, {}, 0),
    "kept gathered": ("lora", False, {}, 608),
}


def test_what_happens_to_an_engine(tmp_path):
    """After each the receiver holds, bit for bit, what DeepSpeed and PEFT say; what nobody has written stays away.

    Two layers of 64 and 152 features, in bf16; adapters of rank 4 on q and down.
    """
    told, others = run_two(jobs.chosen, folder=str(tmp_path), cases=CHOICES)
    assert set(told) == set(CHOICES)
    for case, of in told.items():
        assert all(well for well, _ in (*of.values(), *others[case].values())), (case, of, others[case])
        assert not any(sent for _, sent in others[case].values())
    told = {case: {happened: sent for happened, (_, sent) in of.items()} for case, of in told.items()}
    adapted = 2 * (64 * 64 + 64 * 152)
    for case, sent in told.items():
        assert sent["nothing"] == 0 < sent["step"] < sent["first"] == sent.get("asked for", sent["first"]), case
        if "written" in sent:
            assert 0.99 * 64 * 152 < sent["written"] <= 64 * 152
    assert all(told[case]["step"] <= adapted for case in ("merged", "kept gathered"))
    assert all(
        0 < told[case][happened] <= adapted for case in ("merged", "kept gathered") for happened in ("other", "back")
    )
