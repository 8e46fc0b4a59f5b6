"""Jobs about where the ranks of a group are, that run on ranks."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from models import Mlp, ds_config, llama, make_engine, section, train
from ranks import printed
from running import switch

import zeropp_fp8


def detecting(recipe="zeropp", ranks_per_node="detect", **fields):
    """A ds_config."""
    return ds_config(section(recipe, ranks_per_node=ranks_per_node, **fields))


def attempt(function):
    """The message of a ConfigError; None where there is none."""
    try:
        function()
    except zeropp_fp8.ConfigError as error:
        return str(error)


class TensorParallel:
    """An mpu of two ranks in a row: data-parallel groups are every second rank."""

    def __init__(self):
        world, rank = dist.get_world_size(), dist.get_rank()
        data = [dist.new_group(list(range(first, world, 2))) for first in (0, 1)]
        model = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
        self._data, self._model = data[rank % 2], model[rank // 2]

    def get_data_parallel_group(self):
        return self._data

    def get_data_parallel_world_size(self):
        return dist.get_world_size(self._data)

    def get_model_parallel_group(self):
        return self._model

    def get_model_parallel_rank(self):
        return dist.get_rank(self._model)

    def get_model_parallel_world_size(self):
        return dist.get_world_size(self._model)


def tensor_parallel_engine(config):
    # The same model on both ranks of a pair, which is enough to see where bytes go.
    return make_engine(llama(), config, mpu=TensorParallel())


def nodes_of_tensor_parallel_groups(configured):
    """(nodes, ranks of a group on each, ranks that share a secondary copy, bytes by link, what rank 0 printed)."""
    switch(True)
    config = detecting(ranks_per_node=configured)
    engine = tensor_parallel_engine(config)
    train(engine, 2)
    session, report = engine.zeropp_fp8_session, zeropp_fp8.wire_report(engine)
    links = {link: sum(kind[link] for kind in report["per_step"].values()) for link in ("inter", "intra")}
    topology = session.topology
    return (topology.nodes, topology.ranks_per_node), session.secondary_ranks, links, printed()


def found_with(variables):
    """(nodes, ranks a node) and what rank 0 printed, with a launcher's variables."""
    switch(True)
    os.environ.update(variables)
    engine = make_engine(Mlp(64), detecting())
    topology = engine.zeropp_fp8_session.topology
    return (topology.nodes, topology.ranks_per_node), printed()


def refusal_on(hosts):
    """The ConfigError where ranks are on these hosts; and that a next engine can be made, as many nodes as it has."""
    switch(True)
    os.environ["NCCL_HOSTID"] = hosts[dist.get_rank()]
    message = attempt(lambda: make_engine(Mlp(64), detecting()))
    return message, make_engine(Mlp(64), detecting(ranks_per_node=1)).zeropp_fp8_session.topology.nodes


def refusal_of_tensor_parallel_groups_on(hosts):
    switch(True)
    os.environ["NCCL_HOSTID"] = hosts[dist.get_rank()]
    return attempt(lambda: tensor_parallel_engine(detecting()))


def refusal_of_configurations():
    """Ranks that are configured differently."""
    switch(True)
    return attempt(lambda: make_engine(Mlp(64), detecting(ranks_per_node=1 + dist.get_rank() % 2)))


def time_limits(seconds):
    """How long each group of an engine waits, in seconds, where the world waits `seconds`."""
    switch(True)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))
    engine = make_engine(Mlp(64), detecting("zeropp", 2, secondary={"scope": "rank"}))
    session = engine.zeropp_fp8_session
    levels = [level for hops in session.gather_levels for level in hops]
    levels += [session.topology.between, session.topology.within]
    groups = [session.topology.group, engine.optimizer.dp_process_group, *(level.group for level in levels)]
    gloo = torch.device("cpu")
    return [group._get_backend(gloo).options._timeout.total_seconds() for group in groups]
