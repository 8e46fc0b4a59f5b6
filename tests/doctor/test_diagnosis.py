"""The doctor on versions, variables, kernels and places; what ranks say together is in tests/system/failures."""

import json
import os
import platform
import re
import sys
import time
from dataclasses import asdict

import pytest
import torch.distributed as dist
from triton_process import run

import zeropp_fp8
from zeropp_fp8.__main__ import main as command
from zeropp_fp8.config import PluginConfig
from zeropp_fp8.doctor import accelerator, diagnosis, facts, links, versions
from zeropp_fp8.doctor.compared import differences, own_problems, ranks_text
from zeropp_fp8.doctor.kernels import FORMATS
from zeropp_fp8.doctor.problems import Problem, exit_status, problem_lines
from zeropp_fp8.doctor.ranks import Ranks, Unanswered, joined, place_in_job
from zeropp_fp8.doctor.variables import variable_problems, variables
from zeropp_fp8.plan import H100, H200


def test_versions_of_what_is_needed():
    """Too old, too new, missing; what only extras need is not needed; markers hold."""
    python = platform.python_version()
    wrong = ["torch>=99", "deepspeed<0.1", "no-such-package>=1", "python<3"]
    good = ["torch>=2", "pytest>=999; extra == 'test'", "triton>=999; platform_system == 'Plan9'", f"python=={python}"]
    problems = versions.version_problems([*wrong, *good])
    assert all(each.serious for each in problems)
    for problem, name in zip(problems, ("torch", "deepspeed", "no-such-package", "python"), strict=True):
        assert problem.what.startswith(name)
    assert problems[0].what.endswith("is outside of what is supported, >=99")
    assert problems[0].remedy == 'pip install "torch>=99"'
    assert "no-such-package is not installed, and no-such-package>=1 is needed" in problems[2].text
    assert "start with another Python" in problems[3].text


def test_what_is_needed_is_what_setup_cfg_says(monkeypatch):
    """Installed or not: the same packages and ranges."""
    from packaging.requirements import Requirement

    def ranges():
        found = [Requirement(line) for line in versions.needed()]
        return {each.name: each.specifier for each in found if "extra" not in str(each.marker)}

    def not_installed(name):
        raise versions.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "metadata", not_installed)
    from_file = ranges()
    assert {"python", "torch", "deepspeed", "triton", "peft"} <= set(from_file) and "0.18" in str(
        from_file["deepspeed"]
    )
    monkeypatch.setattr(versions, "metadata", lambda name: {"Requires-Python": str(from_file["python"])})
    lines = [f"{name}{specifier}" for name, specifier in from_file.items() if name != "python"]
    monkeypatch.setattr(versions, "requires", lambda name: [*lines, "pytest; extra == 'test'"])
    assert ranges() == from_file


def test_locks_of_compilations_that_were_killed(tmp_path, monkeypatch):
    """Of any op, under torch's folder per Python and under one that is set; not of one that may still be compiled."""
    now = time.time()

    def paths(found):
        return [re.fullmatch(r"(\S+) is of \w+ \w+ .* \d{4}: .*", each.what)[1] for each in found]

    for root, depth in ((tmp_path / "set", "."), (tmp_path / "cache/torch_extensions", "py312_cu130")):
        for op, minutes in (("cpu_adam", 90), ("deepspeed_shm_comm", 2), ("fused_adam", None)):
            (root / depth / op).mkdir(parents=True)
            if minutes is not None:
                (root / depth / op / "lock").touch()
                os.utime(root / depth / op / "lock", (now, now - 60 * minutes))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    found = [*versions.compilation_problems()]
    assert paths(found) == [f"{tmp_path}/cache/torch_extensions/py312_cu130/cpu_adam/lock"]
    assert not found[0].serious and "delete it" in found[0].remedy
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "set"))
    assert paths(versions.compilation_problems()) == [f"{tmp_path}/set/cpu_adam/lock"]
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "none"))
    assert not [*versions.compilation_problems()]


def test_deepspeed_that_does_not_fit(monkeypatch):
    from zeropp_fp8.plugin import relied_on

    assert versions.deepspeed_problem() is None
    monkeypatch.setitem(relied_on.RELIED_ON, ("deepspeed", ""), "NoSuchName")
    assert "which DeepSpeed" in versions.deepspeed_problem().what
    monkeypatch.setattr(relied_on, "verify", lambda: 1 / 0)
    assert "DeepSpeed cannot be imported: ZeroDivisionError" in versions.deepspeed_problem().what


def test_how_it_is_switched_on(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "zeropp_fp8_autoload", versions)
    monkeypatch.setenv("ZEROPP_FP8_RECIPE", "zeropp")
    assert "by the section of a ds_config, which is looked at, ZEROPP_FP8_RECIPE=zeropp" in versions.switched_on()
    monkeypatch.setenv("ZEROPP_FP8_AUTOLOAD", "0")
    assert "zeropp_fp8.enable() alone: ds_configs are not looked at" in versions.switched_on()
    command(["--version"])
    assert "(ds_configs are not looked at: enable() or" in capsys.readouterr().out
    monkeypatch.delenv("ZEROPP_FP8_AUTOLOAD")
    command(["--version"])
    assert capsys.readouterr().out == f"zeropp_fp8 {zeropp_fp8.__version__} (ds_configs are looked at)\n"
    monkeypatch.delitem(sys.modules, "zeropp_fp8_autoload")
    assert "or not installed by pip" in versions.switched_on()


@pytest.mark.parametrize(
    ("value", "matches"),
    [
        ("eth", True),
        ("=eth", False),
        ("=eth0", True),
        ("^lo", True),
        ("^lo,eth", False),
        ("ib,eth", True),
        ("ib", False),
    ],
)
def test_interfaces_as_nccl_reads_them(value, matches):
    problems = list(variable_problems({"NCCL_SOCKET_IFNAME": value}, ["lo", "eth0"]))
    assert [each.serious for each in problems] == [] if matches else [True]
    assert matches or f"NCCL_SOCKET_IFNAME={value} names no interface of host" in problems[0].what


def test_variables():
    env = {"NCCL_P2P_DISABLE": "1", "GLOO_SOCKET_IFNAME": "eth7", "HOME": "/", "TRITON_INTERPRET": "0"}
    assert variables(env) == {name: value for name, value in sorted(env.items()) if name != "HOME"}
    costly, wrong = variable_problems(variables(env), ["eth0"])
    assert "GPUs of a node copy through the host" in costly.what and not costly.serious
    assert "GLOO_SOCKET_IFNAME=eth7" in wrong.what and "interfaces are eth0" in wrong.remedy and wrong.serious


def test_kernels_against_reference_bytes():
    """In Triton's interpreter: all equal; then one byte of one kernel is another, and decoding and casts are too."""
    script = """
import torch
from zeropp_fp8 import kernels
from zeropp_fp8.doctor.kernels import kernel_differences
from zeropp_fp8.kernels.casts import cast_tensor

CPU = torch.device("cpu")
print(len(kernel_differences(CPU)))
quantize, dequantize, cast = kernels.quantize, kernels.dequantize, cast_tensor.cast_tensor

def wrong_byte(base, tensors, segments, slices, payload, *others):
    quantize(base, tensors, segments, slices, payload, *others)
    payload[1, 5] ^= 1

kernels.quantize = wrong_byte
print("|".join(kernel_differences(CPU)))
kernels.quantize = quantize

def wrong_cast(*arguments):
    codes, *others = cast(*arguments)
    codes.view(torch.uint8)[0, 0] ^= 1
    return codes, *others

cast_tensor.cast_tensor = wrong_cast
print("|".join(kernel_differences(CPU)))
cast_tensor.cast_tensor, add = cast, kernels.add_exact

def wrong_sum(brought, headers_at, body_at, ends, held, *others):
    add(brought, headers_at, body_at, ends, held, *others)
    held[0, 3] ^= 1

kernels.add_exact = wrong_sum
print("|".join(kernel_differences(CPU)))
"""
    equal, encoded, cast, added = run(script, interpret=True).splitlines()
    assert equal == "0"
    expected = [f"kernel: {name}, encoded: 1 of" for name in FORMATS]
    assert [line.partition(" of")[0] + " of" for line in encoded.split("|")] == expected
    assert cast == "kernel: FP8, a scale per tensor: 1 of 35360 bytes differ from those of the torch code"
    expected = [f"kernel: exact difference of {name}, added: 1 of" for name in ("bf16", "int8") for _ in range(2)]
    assert [line[: len(start)] for line, start in zip(added.split("|"), expected, strict=True)] == expected


def a_rank(**others):
    found = {"host": "here", "versions": {}, "variables": {}, "device": {"name": "CPU"}, "problems": []}
    return {**found, **others}


def test_what_ranks_say_side_by_side():
    assert ranks_text([5, 0, 1, 2]) == "ranks 0-2, 5" and ranks_text([5]) == "rank 5"
    same = asdict(Problem("broken", "mend it"))
    problems = own_problems({0: a_rank(problems=[same]), 1: a_rank(), 2: a_rank(problems=[same])})
    assert [each.text for each in problems] == ["ranks 0, 2: broken: mend it"]
    assert own_problems({0: a_rank(problems=[same])}) == [Problem("broken", "mend it")]
    gpus = {rank: a_rank(device={"name": name, "uuid": str(rank)}) for rank, name in enumerate(("A100", "H100"))}
    (mixed,) = differences(gpus)
    assert "A100 on rank 0, H100 on rank 1" in mixed.what and not mixed.serious
    (version,) = differences({0: a_rank(versions={"trl": "1"}), 1: a_rank()})
    assert version.what == "trl differs: 1 on rank 0, not there on rank 1" and version.serious
    names = {0: a_rank(variables={"NCCL_HOSTID": "a"}), 1: a_rank(variables={"NCCL_HOSTID": "b"})}
    assert list(differences(names)) == []


def test_problems_at_the_end():
    remark, wrong = Problem("slow", serious=False), Problem("wrong", "do this")
    assert problem_lines([remark]) == ["note: slow", "no problem found"] and exit_status([remark]) == 0
    assert problem_lines([wrong, remark]) == ["note: slow", "1 problem(s):", "  1. wrong: do this"]
    assert exit_status([remark, wrong]) == 1


def test_places_of_launchers():
    assert place_in_job({}) == (0, 1, 0)
    assert place_in_job({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == (3, 8, 1)
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"):
        with pytest.raises(ValueError, match=f"{variable}=2 says that there are several ranks, and RANK"):
            place_in_job({variable: "2"})
        assert place_in_job({variable: "1"}) == (0, 1, 0)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0: give a whole number from 1 to"),
        ({"RANK": "0", "WORLD_SIZE": "abc"}, "WORLD_SIZE=abc: give a whole number from 1 to"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5: give a whole number from 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK=-1: give a whole number from 0 to"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS=many: give a whole number"),
    ],
)
def test_places_that_launchers_cannot_mean(env, said, monkeypatch, capsys):
    with pytest.raises(ValueError, match=said):
        place_in_job(env)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        diagnosis.main([])
    assert ended.value.code == 1 and capsys.readouterr().err.startswith(f"doctor: {said}")


def test_a_port_that_is_none():
    with pytest.raises(ValueError, match="MASTER_PORT=abc: give a whole number from 0 to 65535"):
        joined(1, 2, 1.0, {"MASTER_PORT": "abc"})


@pytest.mark.parametrize("option", ["--timeout", "--seconds"])
def test_times_longer_than_a_day(option, capsys):
    with pytest.raises(SystemExit) as ended:
        diagnosis.main([option, "1e15"])
    assert ended.value.code == 2 and f"{option}: 1e15: give a number" in capsys.readouterr().err


def test_a_rendezvous_that_is_not_there():
    with pytest.raises(Unanswered, match=r"rank 1: MASTER_ADDR:MASTER_PORT, 127\.0\.0\.1:1, cannot be reached in 1 s"):
        joined(1, 2, 1.0, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})


def test_ranks_that_say_nothing():
    store = dist.HashStore()
    first, second = (Ranks(store, rank, 3, 0.2) for rank in range(2))
    first.tell("it", [1])
    second.tell("it", None)
    assert first.hear("it") == {0: [1], 1: None}
    with pytest.raises(Unanswered, match=r"rank 1: rank 0 has not said what comes next \(it\)"):
        second.decided("it", 0.1)
    first.decide("it", {"a": 1})
    assert second.decided("it", 0.1) == {"a": 1}


def test_hardware_is_what_was_measured():
    found = diagnosis.Diagnosis(facts={0: {"rates": None}}, links={})
    assert diagnosis.hardware_of(found) == diagnosis.replace(H200, link_efficiency=1.0)
    rates = {"matrix_tflops": H200.matrix_tflops / 2, "fp8_tflops": 500.0, "memory_gbs": 1000.0}
    fast = {"rates": rates, "device": {"name": "NVIDIA A100"}}
    slow = {**fast, "rates": {**rates, "memory_gbs": 900.0}}
    link = {"ranks": 2, "all_gather_gbs": 30.0, "all_to_all_gbs": 20.0, "latency_us": 9.0, "bytes": 1}
    found = diagnosis.Diagnosis(facts={0: fast, 1: slow}, links={0: {"within": link}, 1: {}})
    hardware = diagnosis.hardware_of(found)
    assert (hardware.memory_gbs, hardware.fp8_tflops, hardware.intra_gbs) == (900.0, 500.0, 20.0)
    assert hardware.achieved_tflops == H200.achieved_tflops / 2
    # Training on an H100 reaches less of the same products.
    found.facts = {0: {**fast, "device": {"name": "NVIDIA H100 80GB HBM3"}}}
    assert diagnosis.hardware_of(found).achieved_tflops == H100.achieved_tflops / 2 < H200.achieved_tflops / 2


@pytest.mark.parametrize(
    "gpus, exchanged, named", [(True, 1.9, True), (True, 2.5, False), (False, 1.9, False), (True, None, False)]
)
def test_slow_exchanges_are_named(gpus, exchanged, named):
    """Between nodes only, on GPUs only, and where there is such a level."""
    within = {"all_gather_gbs": 30.0, "all_to_all_gbs": 1.0, "latency_us": 9.0}
    between = {"all_gather_gbs": 3.0, "all_to_all_gbs": exchanged, "latency_us": 9.0}
    levels = {"within": within} if exchanged is None else {"within": within, "between": between}
    found = diagnosis.Diagnosis(facts={0: {"rates": {} if gpus else None}}, links={0: levels, 1: levels})
    problems = diagnosis._slow_exchanges(found)
    assert [not problem.serious for problem in problems] == [True] * named
    if named:
        assert "an all-to-all moves 1.9 GB/s where an all-gather moves 3" in problems[0].what
        assert "NCCL_SOCKET_NTHREADS=4 and NCCL_NSOCKS_PERTHREAD=4" in problems[0].remedy


def test_a_rank_without_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(accelerator.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(accelerator.torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match="local rank 2 has no GPU: 2 are visible; start at most 2 rank"):
        accelerator.device_of(2)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--json", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["--params", "-1"], "--params: -1: give a number above 0"),
    ],
)
def test_wrong_options_of_the_doctor(words, said, capsys, monkeypatch):
    """Before anything is measured; status 1 would say that something is wrong with the machine."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        command(["doctor", *words])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_alone(capsys, tmp_path, monkeypatch):
    """The command on one rank: its report, its file, its exit status; and one whose kernels differ."""
    for name in ("RANK", "WORLD_SIZE", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "doctor.json"
    with pytest.raises(SystemExit) as ended:
        command(["--local_rank=0", "doctor", "--json", str(path)])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and text.endswith("no problem found\n")
    assert f"python {platform.python_version()}, zeropp_fp8 {zeropp_fp8.__version__}" in text
    assert "not tested: there is no accelerator" in text and "7 B parameters" in text
    assert "tokens per GPU (links as measured, computing as on an H200)\n" in text and "recommended" not in text
    assert accelerator.os.environ["DS_ACCELERATOR"] == "cpu" and "DS_ACCELERATOR" not in text
    found = json.loads(path.read_text())
    assert found["status"] == 0 and found["recommended"] is found["advice"] is None and found["nodes_from"] in text
    assert found["hardware"] == asdict(diagnosis.replace(H200, link_efficiency=1.0))
    for row in found["recipes"]:
        memory = row["peak_bytes"] / 2**30
        assert re.search(rf"^{row['method']} +{1e3 * row['step_s']:.1f} .* {memory:.2f} ", text, flags=re.M)

    monkeypatch.setattr(facts, "device_of", lambda local_rank: accelerator.torch.device("cuda"))
    monkeypatch.setattr(facts, "describe", lambda device: {"name": "a GPU", "bytes": 10**11})
    rates = {"matrix_tflops": 100.0, "fp8_tflops": 100.0, "memory_gbs": 1000.0}
    monkeypatch.setattr(facts, "rates", lambda device: rates)
    monkeypatch.setattr(facts, "kernel_differences", lambda device: ["kernel: int8, encoded: 1 of 9 bytes differ"])
    with pytest.raises(SystemExit) as ended:
        command(["doctor"])
    text = capsys.readouterr().out
    assert ended.value.code == 1 and "DIFFER from those of the torch code (rank 0)" in text
    assert "tokens per GPU (modelled)\n" in text and "\nnothing fits into 93.1 GiB per GPU: " in text
    assert "1. kernel: int8, encoded: 1 of 9 bytes differ: training would be wrong" in text
    with pytest.raises(SystemExit) as ended:
        command(["doctor", "--json", "/dev/full"])
    assert ended.value.code == 1 and "doctor: " in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        command(["doctor", "--vocabulary", "32000000"])
    assert "note: no plan: 2 embedding(s) of 32000000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["doctor", "--seconds", "-1"], "--seconds: -1: give a number at least 0"),
        (["doctor", "--timeout", "0"], "--timeout: 0: give a number above 0"),
        (["doctor", "--ranks-per-node", "0"], "--ranks-per-node: 0: give a whole number from 1"),
        (["plan", "--ranks", "2"], "plan: unrecognized arguments: --ranks 2"),  # not short for --ranks-per-node
        (["export", "checkpoint", "out", "--tru"], "export: unrecognized arguments: --tru"),
        (["plann"], 'there is no command "plann" (did you mean "plan"?); there are doctor, check, plan,'),
        ([], "usage: python -m zeropp_fp8 COMMAND"),
    ],
)
def test_wrong_commands(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command(words)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        command(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and all(name in shown for name in ("doctor", "check", "plan"))


class Links:
    """Four ranks on GPUs, by a clock of their own: a link of 200 GB/s, and waits that sleep a millisecond at a time."""

    size, group = 4, None

    def __init__(self):
        self.now, self.ends, self.sizes = 0.0, 0.0, set()

    def perf_counter(self):
        self.now += 1e-6
        return self.now

    def sent(self, received, payload, *others, **more):
        self.sizes.add(len(received) // self.size)
        self.ends = self.now + 20e-6 + 3 * len(received) / self.size / 200e9
        return self

    def is_completed(self):
        self.now += 1e-6
        return self.now >= self.ends

    def wait(self):
        while self.now < self.ends:
            self.now += 1e-3


@pytest.mark.parametrize("collective", links.COLLECTIVES)
def test_rates_of_a_link_are_those_that_it_has(collective, monkeypatch):
    """Of both collectives, in messages as large as they get: how the host waits is not measured."""
    here, cuda = Links(), accelerator.torch.device("cuda")
    empty = lambda numel, **others: range(numel)  # noqa: E731
    monkeypatch.setattr(links.torch, "empty", empty)
    monkeypatch.setattr(links.torch, "zeros", empty)
    monkeypatch.setattr(links, "time", here)
    monkeypatch.setattr(links, "start_level", here.sent)
    monkeypatch.setattr(links.dist, "all_to_all_single", here.sent)
    monkeypatch.setattr(links, "_agreed", lambda seconds, *others: seconds)
    rate, size = links._rate(collective, here, here, cuda, 1.0)
    assert size == max(here.sizes) == links.LARGEST_BYTES // 8
    assert rate == pytest.approx(200, rel=0.03)
    latency = links._seconds("all_gather", here, here, cuda, links.SMALL_BYTES, 20)
    assert latency == pytest.approx(20e-6, rel=0.25)


def test_facts_can_be_sent():
    found = facts.facts_of(0, 0, PluginConfig())
    assert json.loads(json.dumps(found)) == found and found["problems"] == []
