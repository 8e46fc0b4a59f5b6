"""The doctor on several ranks: what differs is named, and nobody waits for a rank that raises or dies."""

import json
import math
import re
import subprocess
import sys
from dataclasses import asdict, replace

import doctor_jobs as jobs
import pytest
from hang_guard import HANG
from ranks import run_ranks, run_two

from tests.places import ROOT
from zeropp_fp8.config.words import numbered
from zeropp_fp8.plan import METHODS, Cluster, Job, Model, estimate
from zeropp_fp8.plan.hardware import H200


def test_ranks_that_differ_or_raise(tmp_path):
    path = tmp_path / "doctor.json"
    found = run_ranks(jobs.several, env={"DOCTOR_JSON": str(path)})
    texts = {name: found[0][name][1] for name in found[0]}
    for name in found[0]:
        statuses = [one[name][0] for one in found]
        if name == "report":
            assert statuses == ["RuntimeError('no report')", 1, 1, 1]
            continue
        assert statuses == [int(name not in ("well", "detected", "uneven"))] * 4, (name, texts[name])
        assert all(one[name][1] == "" for one in found[1:])
        assert max(one[name][2] for one in found) < 40, name

    assert re.search(
        r"nodes         2 x 2 rank\(s\) over gloo, from the hosts of the ranks.*: node0, node1\n", texts["well"]
    )
    assert texts["well"].count("links         ") == 2 and texts["well"].endswith("no problem found\n")
    assert "not tested: there is no accelerator" in texts["well"] and "recommended" not in texts["well"]
    assert "(links as measured, computing as on an H200)" in texts["well"]
    assert "links         " not in texts["detected"] and "computing as on" not in texts["detected"]
    check_json(json.loads(path.read_text()))

    assert "is 1 on rank 0 and 2 on rank 3; give all ranks the same ds_config" in texts["topology"]
    version = jobs.zeropp_fp8.__version__
    assert f"zeropp_fp8 differs: {version} on ranks 0-1, 3, 0.0.1 on rank 2: install the same" in texts["version"]
    assert "devices differ: CPU on rank 0, a GPU on ranks 1-3" in texts["device"]
    assert "ranks 1-3 share one GPU of" in texts["device"]
    assert "note: NCCL_P2P_LEVEL differs: SYS on ranks 0-1, NVL on ranks 2-3" in texts["device"]
    assert "rank 3 cannot look at itself: RuntimeError: no packages" in texts["looking"]
    assert "rank 1: the device cannot be used: RuntimeError: no driver" in texts["driver"]
    assert re.search(r"note: links within nodes of ranks 2-3 \(.*\) send 0.1 GB/s, the median is 0.55", texts["uneven"])
    assert "rank 3 cannot measure links: RuntimeError: no link" in texts["measuring"]
    for name in ("topology", "version", "device", "looking", "driver"):
        assert "links         " not in texts[name]


def check_json(found):
    """The file holds what was found; recipes are the plan's at the measured rates."""
    assert (
        found["status"] == 0
        and not any(each["serious"] for each in found["problems"])
        and (found["nodes"], found["ranks_per_node"]) == (2, 2)
    )
    assert sorted(found["ranks"]) == ["0", "1", "2", "3"]
    assert found["recommended"] is found["advice"] is None and found["recipes"]
    within, between = (found["links"][level] for level in ("within", "between"))
    assert within.keys() == between.keys() == {"all_gather_gbs", "all_to_all_gbs", "latency_us"}
    assert all(0 < rate < math.inf for rate in (*within.values(), *between.values()))
    gbit = 8 * 2 * min(between["all_gather_gbs"], between["all_to_all_gbs"])
    job = Job(Model.from_parameters(1.3e9), Cluster(2, 2, gbit), 2048)
    hardware = replace(H200, intra_gbs=min(within["all_gather_gbs"], within["all_to_all_gbs"]), link_efficiency=1.0)
    assert found["hardware"] == asdict(hardware) and found["job"] == asdict(job)
    for row in found["recipes"]:
        assert row["step_s"] == pytest.approx(estimate(METHODS[row["method"]], job, hardware).step_s)


@pytest.mark.parametrize(("when", "who"), [("facts", 2), ("links", 1)])
def test_a_rank_that_dies(when, who):
    found = run_ranks(jobs.dying, dying=(who,), when=when, who=who)
    assert found[who] == 9
    status, text, seconds = found[0]
    assert status == 1 and seconds < HANG
    about = "rank 2 said nothing of themselves" if when == "facts" else r"ranks? 1.* said nothing of links"
    assert re.search(f"  \\d\\. {about} in time: look at what they printed", text), text
    assert [found[rank][0] for rank in range(4) if rank != who] == [1, 1, 1]


def test_rank_0_dies():
    """Nobody says what comes next: the others end with their own message."""
    found = run_ranks(jobs.dying, dying=(0,), when="facts", who=0)
    assert found[0] == 9
    for message, _, seconds in found[1:]:
        assert "rank 0 has not said what comes next (measuring); it may have ended" in message and seconds < HANG


def test_under_torchrun(tmp_path):
    """The command, its rendezvous and its exit status, by the benchmark that keeps what it says."""
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.doctor", "--ranks", "2", "--seconds", "0.2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("versions      ") == 1 and done.stdout.strip().endswith("no problem found")
    assert "1 x 2 rank(s)" in done.stdout and done.stdout.count("links         within nodes") == 1
    result = json.loads(out.read_text())
    assert result["printed"][-1] == "no problem found" and result["found"]["status"] == 0 and result["finished"]
    places = [one["place"]["host"] for one in result["found"]["ranks"].values()]
    assert places == ["host0", "host0"] and any(line.endswith("of the ranks: host0") for line in result["printed"])


LOW, LOSSLESS = {"recipe": "fp8-lm-zeropp"}, {"recipe": "lossless"}
BATCH = {"gradient_accumulation_steps": 1, "sequence_parallel_size": 2}
IN_16_BITS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
STARTED = [  # a case, and whether an engine is made of it
    ({}, True),
    ({"zero_optimization": {"cpu_offload": True}}, True),
    ({"zero_optimization": {"cpu_offload": True}, "section": LOW}, False),
    ({"zero_optimization": {"cpu_offload_param": True}, "section": {"partition": "whole_tensor"}}, False),
    ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "amsgrad": True}}}, True),
    ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "amsgrad": True}}, "section": LOW}, False),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}, True),
    ({"scheduler": {"type": "StepLR", "params": {"step_size": 5}}}, False),
    ({"train_batch_size": 2, **BATCH}, True),
    ({"train_batch_size": 4, **BATCH}, False),
    ({"prescale_gradients": True, "section": LOSSLESS}, False),
    ({"prescale_gradients": True, "section": LOSSLESS, "zero_optimization": {"reduce_scatter": False}}, True),
    ({"gradient_predivide_factor": 2.0, "section": LOSSLESS}, False),
    (IN_16_BITS, False),
    ({"gradient_clipping": "abc"}, False),
    ({"gradient_clipping": -1}, False),
    ({"gradient_cliping": 1.0}, False),
    ({"another_plugin": {"gradient_cliping": 1.0}}, True),
    ({"steps_per_print": "often"}, False),
    ({"steps_per_print": float("inf")}, True),  # as Accelerate writes it
    ({"train_micro_batch_size_per_gpu": "2"}, False),
    ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": -1e-4, "betas": [0.9, 1.5]}}}, False),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "5", "warmup_mni_lr": 0}}}, False),
    (
        {
            "section": {"recipe": "zerop", "enabled": 1},
            "zero_optimization": {
                "reduce_scatter": "false",
                "stage3_prefech_bucket_size": 1,
                "offload_param": {"device": "nvme"},
                "offload_optimizer": {"device": "nvme"},
            },
            "optimizer": {"type": "AdmaW"},
            "bf16": {"enabled": "yes!"},
            "wandb": {"projct": "x"},
        },
        False,
    ),
    ({"bf16": {**IN_16_BITS["bf16"], "bf16_optimizer_states": True}}, True),
    ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, False),
]


def test_check_refuses_what_an_engine_does():
    for of_rank in run_two(jobs.checked_and_started, cases=[case for case, _ in STARTED]):
        for (case, starts), (found, error) in zip(STARTED, of_rank):
            assert (found == []) == (error == "") == starts, (case, found, error)
            assert starts or error == numbered(found)
