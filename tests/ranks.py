"""Running a function on several gloo ranks, each a fresh process forked from a server that has imported everything.

A start takes 0.2 s this way, where spawning takes 13 s. Fresh processes leak no process group and no zero.Init state
from one test to the next.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path

from tests.hang_guard import HANG

_context = None


def forkserver_context():
    """multiprocessing's, whose server has imported everything."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["tests.rank_server"])
        # Python before 3.13 does not tell the server its sys.path, and the server passes over what it cannot import.
        given = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        try:
            forkserver.ensure_running()
        finally:
            os.environ.pop("PYTHONPATH")
            if given is not None:
                os.environ["PYTHONPATH"] = given
    return _context


def _keep_to_a_core(rank, world):
    """Where ranks share cores, each stays on one: a tenth to a fifth less time."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if world > len(cores):
            os.sched_setaffinity(0, {cores[rank * len(cores) // world]})


def _wait_for_every_gather():
    """Of several gathers DeepSpeed before 0.19.8 waits for the last alone, without the plugin.

    On a stream that is all of them. Gloo's are independent: stock, which tests compare with, reads weights that have
    not come. Gathered one by one, each is waited for.
    """
    from deepspeed.runtime.zero.partition_parameters import Init

    stock = Init._allgather_params_coalesced

    def _allgather_params_coalesced(self, param_list, *args, **kwargs):
        for param in param_list:
            stock(self, [param], *args, **kwargs)

    Init._allgather_params_coalesced = _allgather_params_coalesced


def _main(function, arguments, rank, world, ranks_per_node, folder, env):
    """One rank: environment, process group, the function, its result or traceback into a file."""
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "LOCAL_SIZE": str(world),
            "NCCL_HOSTID": f"node{rank // ranks_per_node}",  # what a host is, to NCCL and to the plugin
            "DS_ACCELERATOR": "cpu",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "OMP_NUM_THREADS": "1",  # else Accelerate takes a thread a core, on cores that ranks share
            **env,
        }
    )
    log = os.open(os.path.join(folder, f"log{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)
    _keep_to_a_core(rank, world)
    try:
        import deepspeed
        import torch
        import torch.distributed as dist
        from packaging.version import Version

        if "tests.rank_server" not in sys.modules:
            importlib.import_module("tests.rank_server")  # raises what the server met
            raise ImportError("the server of ranks did not import tests.rank_server")
        torch.set_num_threads(1)
        store = dist.FileStore(os.path.join(folder, "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        if Version(deepspeed.__version__) < Version("0.19.8"):
            _wait_for_every_gather()
        outcome = ("ok", function(**arguments))
    except BaseException:
        outcome = ("error", traceback.format_exc())
    with open(os.path.join(folder, f"part{rank}"), "wb") as f:
        pickle.dump(outcome, f)
    os.rename(os.path.join(folder, f"part{rank}"), os.path.join(folder, f"result{rank}"))
    os._exit(0)


class RankError(AssertionError):
    """A rank raised; the message is its traceback."""


def run_ranks(function, world=4, ranks_per_node=2, timeout=HANG, env=None, dying=(), **arguments):
    """Run module-level `function(**arguments)` on `world` ranks; returns their results in rank order.

    Ranks that are `dying` must end by a signal, whose number is their result.

    Raises RankError with the traceback as soon as one rank raises, or when time is up; the others are ended then.
    """
    for last_try in (False, False, True):
        try:
            return _run_once(function, arguments, world, ranks_per_node, timeout, env, dying)
        except RankError as error:
            # gloo's rendezvous failed 3 times in 120 starts of 6 ranks on a loaded machine, and once twice in a row,
            # before any code under test ran.
            in_rendezvous = "init_process_group" in str(error) and "connectFullMesh" in str(error)
            if last_try or not in_rendezvous:
                raise
    raise AssertionError("unreachable")


def run_two(function, **arguments):
    """run_ranks on two nodes of a rank: for what depends neither on hops within nodes nor on orders of summation.

    It takes half as long as two nodes of two.
    """
    return run_ranks(function, world=2, ranks_per_node=1, **arguments)


_kept: dict[tuple, list] = {}


def run_two_once(function, **arguments):
    """run_two, of which this process keeps the results: for references that several tests compare with."""
    key = (function.__module__, function.__qualname__, pickle.dumps(arguments))
    if key not in _kept:
        _kept[key] = run_two(function, **arguments)
    return _kept[key]


def _run_once(function, arguments, world, ranks_per_node, timeout, env, dying):
    with tempfile.TemporaryDirectory() as folder:
        context = forkserver_context()
        processes = [
            context.Process(target=_main, args=(function, arguments, r, world, ranks_per_node, folder, env or {}))
            for r in range(world)
        ]
        for process in processes:
            process.start()
        results: dict[int, object] = {}
        deadline = time.monotonic() + timeout
        try:
            while len(results) < world:
                for rank in range(world):
                    path = Path(folder, f"result{rank}")
                    if rank not in results and path.exists():
                        kind, value = pickle.loads(path.read_bytes())
                        if kind == "error":
                            raise RankError(f"rank {rank} of {world}:\n{value}\n{_tail(folder, rank)}")
                        results[rank] = value
                    if rank in dying and (processes[rank].exitcode or 0) < 0:
                        results[rank] = -processes[rank].exitcode
                if time.monotonic() > deadline:
                    missing = sorted(set(range(world)) - set(results))
                    raise RankError(f"ranks {missing} did not finish in {timeout} s\n{_tail(folder, missing[0])}")
                time.sleep(0.01)
        finally:
            for process in processes:
                if len(results) < world:
                    process.kill()
                process.join()
        return [results[rank] for rank in range(world)]


def _tail(folder, rank, lines=40):
    path = Path(folder, f"log{rank}")
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


def attempt(call):
    """The message of what a call raises; of what a script refuses, the reason."""
    try:
        call()
    except SystemExit as refused:
        error = refused.__context__
    except Exception as raised:
        error = raised
    else:
        return "nothing raised"
    return f"{type(error).__name__}: {error}"


def printed(rank=0):
    """Return what this rank has printed so far; for use inside a function that runs on ranks."""
    sys.stdout.flush()
    return Path(os.readlink("/proc/self/fd/1")).read_text()
