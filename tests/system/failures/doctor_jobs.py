"""Jobs about the doctor, that run on ranks."""

from __future__ import annotations

import contextlib
import io
import os
import time

import torch.distributed as dist
from models import batches, llama, make_engine
from running import allow_fp16_on_cpu, stepped

import zeropp_fp8
from zeropp_fp8.doctor import diagnosis, facts, links
from zeropp_fp8.doctor.check import check
from zeropp_fp8.doctor.ranks import Ranks, Unanswered

SOON = ("--timeout", "4", "--seconds", "0.2")


def diagnosed(*options, name="doctor"):
    """(status, what this rank has printed, seconds) of the doctor, over the store of the process group."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    arguments = diagnosis.parse([*SOON, "--params", "1.3e9", *options])
    ranks = Ranks(store, dist.get_rank(), dist.get_world_size(), arguments.timeout)
    start, out = time.monotonic(), io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            status = diagnosis.diagnose(ranks, 0, arguments)
        except Unanswered as error:
            return str(error), out.getvalue(), time.monotonic() - start
    return status, out.getvalue(), time.monotonic() - start


@contextlib.contextmanager
def replaced(owner, name, value):
    """An attribute, for a while."""
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def raising(message):
    def function(*args, **kwargs):
        raise RuntimeError(message)

    return function


def several():
    """One start: well; another topology, version, variable, device; ranks that raise before and while measuring."""
    rank, found = dist.get_rank(), {}
    found["well"] = diagnosed("--json", os.environ["DOCTOR_JSON"], name="well")
    found["detected"] = diagnosed("--timeout", "60", "--seconds", "0", name="detected")
    found["topology"] = diagnosed("--ranks-per-node", str(1 + rank // 3), name="topology")
    with replaced(zeropp_fp8, "__version__", "0.0.1" if rank == 2 else zeropp_fp8.__version__):
        found["version"] = diagnosed(name="version")
    os.environ["NCCL_P2P_LEVEL"] = "SYS" if rank < 2 else "NVL"
    shared = {"name": "a GPU", "uuid": "one", "bytes": 1}
    with replaced(facts, "describe", lambda device: shared if rank else {"name": "CPU"}):
        found["device"] = diagnosed(name="device")
    del os.environ["NCCL_P2P_LEVEL"]
    with replaced(facts.versions, "versions", raising("no packages") if rank == 3 else facts.versions.versions):
        found["looking"] = diagnosed(name="looking")
    with replaced(facts, "device_of", raising("no driver") if rank == 1 else facts.device_of):
        found["driver"] = diagnosed(name="driver")
    with replaced(diagnosis, "report", raising("no report")):
        try:
            found["report"] = diagnosed(name="report")
        except RuntimeError as error:
            found["report"] = (repr(error), "", 0.0)
    with replaced(links, "_rate", lambda *given: (0.1 if rank // 2 else 1.0, 1)):
        found["uneven"] = diagnosed(name="uneven")
    # The last one: ranks are left waiting in a collective.
    with replaced(links, "start_level", raising("no link") if rank == 3 else links.start_level):
        found["measuring"] = diagnosed(name="measuring")
    return found


def dying(when, who):
    """`who` is killed before it says anything ("facts"), or while it measures ("links")."""
    if dist.get_rank() == who and when == "facts":
        os.kill(os.getpid(), 9)
    with (
        replaced(links, "_rate", killed if dist.get_rank() == who else links._rate),
        replaced(diagnosis, "START_S", 2),
    ):
        return diagnosed()


def killed(*args):
    os.kill(os.getpid(), 9)


def checked_and_started(cases):
    """Of each case, keys beside those of a usual ds_config, {"section": {..}, "zero_optimization": {..}, ..}:

    (what check finds serious, the error of the engine that is made of it: "" where it makes a step).
    """
    zeropp_fp8.enable()
    allow_fp16_on_cpu()
    return [_checked_and_started(**case) for case in cases]


def _checked_and_started(section=None, zero_optimization=None, **others):
    given = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 3, **(zero_optimization or {})},
        "zero_force_ds_cpu_optimizer": False,
        "zeropp_fp8": {"recipe": "zeropp", "report": {"every": 0}, **(section or {})},
        **others,
    }
    found = [each.text for each in check(given, dist.get_world_size(), 1).problems if each.serious]
    try:
        engine = make_engine(llama(layers=1), given, optimizer=None)
    except Exception as error:
        return found, str(error) if isinstance(error, zeropp_fp8.ConfigError) else repr(error)
    (tokens,) = batches(1, dist.get_rank())
    stepped(engine, tokens)
    engine.destroy()
    return found, ""
