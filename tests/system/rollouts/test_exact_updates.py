"""Updates of real engines: every bit comes, few bits are sent, and no failure of an engine costs the trainer more."""

import exact_updates_jobs as jobs
from hang_guard import HANG
from ranks import run_two

_FP8 = {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}
CASES = {
    "slices": ("zeropp", "none", "bf16", {}, {}),
    "in fp32": ("lossless", "none", "fp32", {}, {}),
    "differences": ("zeropp-exact", "none", "bf16", {}, {}),
    "owners": ("fp8-lm", "none", "bf16", {}, {"compute": _FP8}),
    "codes of owners": ("fp8-lm", "none", "bf16", {"format": "fp8"}, {"compute": {**_FP8, "scaling": "delayed"}}),
    "codes": ("zeropp", "none", "bf16", {"format": "fp8"}, {}),
    "LoRA": ("zeropp", "lora", "bf16", {}, {}),
    "LoRA on NF4": ("qlora", "lora", "bf16", {}, {}),
    "adapters": ("qlora", "lora", "bf16", {"weights": "adapters"}, {}),
}


def test_what_updates_hold():
    """All at first and after any rank has forgotten; differences take fewer bytes, but for numbers of 32 bits."""
    first, second = run_two(jobs.what_updates_hold, cases=CASES)
    for case, (rounds, _, whole) in first.items():
        assert [same for same, _, _ in rounds] == [True] * 4, case
        assert [version for _, _, version in rounds] == [1, 3, 4, 5], case
        first_sent, large, small, sent_again = (sent for _, sent, _ in rounds)
        assert first_sent == sent_again == whole, case
        if case == "adapters":
            assert large == small == whole
        elif case != "in fp32":
            bits = 8 if case.startswith("codes") else 16
            assert 0 < large < 0.3 * whole and small < 0.5 / bits * whole, (case, large / whole, small / whole)
    for case, (rounds, outside, _) in second.items():
        assert all(same and not sent for same, sent, _ in rounds), case
        if case in ("slices", "in fp32", "differences", "owners"):
            assert outside == 0, "nothing is gathered, and nothing has changed"


def test_buffers():
    """A receiver has the first rank's, as checkpoints do, and not a part of each rank's."""
    (updates, changes, here), (_, _, there) = run_two(jobs.buffers)
    assert updates and changes and here != there


def test_to_another_process(tmp_path):
    """An engine holds what was handed over; a step costs no more than its differences."""
    found, others = run_two(jobs.to_a_stand_in, folder=str(tmp_path))
    assert all(of["equal"] for of in (*found.values(), *others.values()))
    for (name, number), of in found.items():
        assert of["versions"] == (number + 1, str(number + 1))
        calls = [call for call in of["calls"] if call != "update"]
        assert calls == ["start", "finish"] and len(of["calls"]) > 3, name
        assert of["sent"] == of["all"] if number == 0 or name == "adapters" else 0 < of["sent"] < of["all"] / 2, name


def test_engines_that_fail(tmp_path):
    """Every rank hears of it, at once; the next hand-over makes it good, also to an engine that was started again."""
    (first, losses), (second, others) = run_two(jobs.engines_that_fail, folder=str(tmp_path))
    failed = "RuntimeError: send_weights failed on rank 0: "
    says = {
        ("start", "fails"): f"{failed}RuntimeError: the engine says: ValueError: start is not to be had",
        ("update", "fails"): f"{failed}RuntimeError: the engine says: ValueError: update is not to be had",
        ("finish", "fails"): f"{failed}RuntimeError: the engine says: ValueError: finish is not to be had",
        ("update", "lost"): f"{failed}RuntimeError: the engine says: MissedUpdate: ",
        ("start", "lost"): f"{failed}RuntimeError: the engine says: MissedUpdate: ",
        ("update", "dies"): failed,  # by the socket, or by the group
        ("start", "dies"): f"{failed}ConnectionError: the engine is gone",
        ("update", "sleeps"): "done",
    }
    for found in (first, second):
        for case, begin in says.items():
            said, took, then, same = found[case]
            assert said.startswith(begin), (case, said)
            assert then == "done" and same, (case, then)
            assert took < HANG, (case, took)
        assert found["restarted"][0]
        assert found["gone"].startswith("RuntimeError: joining the receivers of weights failed on rank 0: ")
    assert first["restarted"][1] == 1 and len(losses) == len(others) == 1


def test_while_training_goes_on(tmp_path):
    """An engine gets the weights that were there when it was told, and a failure is raised by the next hand-over."""
    first, second = run_two(jobs.while_training_goes_on, folder=str(tmp_path))
    assert first[:3] == [(1, True), (1, 1), (2, True)]
    failed = (
        "RuntimeError: send_weights failed on rank 0: RuntimeError: the engine says: ValueError: update is not to be"
    )
    for found in (first, second):
        ended, raised, then = found[3]
        assert ended == then == "done" and raised.startswith(failed) and found[4]


def test_through_a_folder(tmp_path):
    """A receiver of any age comes to the newest weights, across a trainer's restart; old versions go."""
    (found, said), (others, said_there) = run_two(jobs.through_a_folder, folder=str(tmp_path))
    assert all(same for _, same, _ in (*found, *others))
    assert [version for version, _, _ in found] == [1, 2, 2, 3, 4, 9, 9, 11]  # a version that failed is none
    listed = [[int(name[:8]) for name in names] for _, _, names in found]
    assert listed == [[1], [1, 2], [1, 2], [1, 2, 3], [3, 4], [4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9], [8, 9, 11]]
    for of_rank in (said, said_there):
        assert of_rank[0].startswith("RuntimeError: send_weights failed on rank 0: NotADirectoryError: ")
        assert of_rank[1].startswith("RuntimeError: reading the folder of weights failed on rank 0: FileExistsError: ")
